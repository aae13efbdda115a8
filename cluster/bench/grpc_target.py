"""Airside's `Generate` as a target."""

from __future__ import annotations

import time

import grpc

from airside.cluster.bench.streams import StreamTimes, TargetError
from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import ControlStub, InferenceStub


class GrpcTarget:
    """A server by its address. Methods raise grpc.RpcError too, with the status the server gave.

    Args:
        address: HOST:PORT.
        timeout_s: for a whole answer.
    """

    def __init__(self, address: str, timeout_s: float = 1800.0) -> None:
        self._address = address
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Connects, and asks who is there."""
        self._channel = grpc.aio.insecure_channel(self._address)
        self._inference = InferenceStub(self._channel)
        try:
            await ControlStub(self._channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        except BaseException:  # a channel that outlives its event loop hangs when it is collected
            await self.close()
            raise

    async def stream(self, prompt: list[int], num_tokens: int) -> StreamTimes:
        """See `Target`."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.Sampling(temperature=0),
            stop=pb.Stop(max_tokens=num_tokens, ignore_eos=True),
        )
        times = StreamTimes(time.perf_counter())
        async for event in self._inference.Generate(request, timeout=self._timeout_s):
            if event.HasField("delta") and event.delta.token_ids:
                times.came.append(time.perf_counter())
                times.num_tokens += len(event.delta.token_ids)
            elif event.HasField("finished"):
                times.prompt_tokens = event.finished.usage.prompt_tokens
        times.ended = time.perf_counter()
        if not times.came:
            raise TargetError(f"{self._address}: an answer without any token")
        return times

    async def close(self) -> None:
        """Disconnects."""
        await self._channel.close(None)
