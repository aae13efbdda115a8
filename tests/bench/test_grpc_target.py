"""`GrpcTarget` against a server that answers as a script says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from airside.cluster.bench.grpc_target import GrpcTarget
from airside.cluster.bench.streams import StreamTimes, TargetError
from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import (
    ControlServicer,
    InferenceServicer,
    add_ControlServicer_to_server,
    add_InferenceServicer_to_server,
)

pytestmark = pytest.mark.timeout(60)


class Scripted(InferenceServicer, ControlServicer):
    """Sends these events; then ends, or says nothing more."""

    def __init__(self, events: list[pb.GenerateEvent], hangs: bool) -> None:
        self.events = events
        self.hangs = hangs
        self.is_over = threading.Event()

    def GetServerInfo(self, *_: Any) -> pb.ServerInfo:  # noqa: N802
        return pb.ServerInfo()

    def Generate(self, *_: Any) -> Iterator[pb.GenerateEvent]:  # noqa: N802
        yield from self.events
        if self.hangs:
            self.is_over.wait(30)


DELTA = pb.GenerateEvent(delta=pb.Delta(token_ids=[1, 2]))
FINISHED = pb.GenerateEvent(finished=pb.Finished(usage=pb.Usage(prompt_tokens=3)))


def streamed(events: list[pb.GenerateEvent], hangs: bool = False, timeout_s: float = 60.0) -> StreamTimes:
    async def run(port: int) -> StreamTimes:
        target = GrpcTarget(f"127.0.0.1:{port}", timeout_s)
        await target.open()
        try:
            return await target.stream([5, 6, 7], 4)
        finally:
            await target.close()

    server, scripted = grpc.server(ThreadPoolExecutor(2)), Scripted(events, hangs)
    add_InferenceServicer_to_server(scripted, server)
    add_ControlServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        return asyncio.run(run(port))
    finally:
        scripted.is_over.set()
        server.stop(None).wait(10)


def test_tokens_are_counted() -> None:
    times = streamed([DELTA, DELTA, FINISHED])
    assert (times.num_tokens, len(times.came), times.prompt_tokens) == (4, 2, 3)
    assert times.sent <= times.came[0] <= times.ended


def test_an_answer_without_tokens_is_an_error() -> None:
    with pytest.raises(TargetError, match="an answer without any token"):
        streamed([FINISHED])


def test_an_answer_without_end_is_an_error() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        streamed([DELTA], hangs=True, timeout_s=1.0)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
