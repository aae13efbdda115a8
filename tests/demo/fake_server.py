"""A stand-in for `airside up`: speaks the public API, reads no picture, and can fail in chosen ways.

python fake_server.py MODE CONFIG
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import yaml

from airside.cluster.demo_model.exhibits import exhibits
from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import (
    ControlServicer,
    InferenceServicer,
    add_ControlServicer_to_server,
    add_InferenceServicer_to_server,
)

ANSWERS = {exhibit.pictures: exhibit.answer for exhibit in exhibits()}
STORY_TOKENS_MAX = 20_000
POLLS_UNTIL_UP = 5  # ListWorkers calls before new vision workers are ready


class FakeServer(InferenceServicer, ControlServicer):
    """How it behaves is its mode.

    "good"; "misreads" every picture; "refuses" chats; "dies" in a chat; "uneven": one worker gets no work; "stalls": a
    story stands still after its first word.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.aborted = asyncio.Event()
        self.jobs_done: dict[str, int] = {"vision-0": 0}
        self.polls_left = 0

    async def GetServerInfo(self, _request: pb.GetServerInfoRequest, _context: object) -> pb.ServerInfo:
        return pb.ServerInfo(state="ready", model="fake", gauges=pb.Gauges(vision_workers=len(self.jobs_done)))

    async def ListWorkers(self, _request: pb.ListWorkersRequest, _context: object) -> pb.ListWorkersReply:
        self.polls_left = max(0, self.polls_left - 1)
        rows = [
            pb.Worker(
                role="vision_worker",
                name=name,
                state="starting" if self.polls_left and name != "vision-0" else "ready",
                jobs_done=done,
            )
            for name, done in self.jobs_done.items()
        ]
        return pb.ListWorkersReply(workers=[pb.Worker(role="controller", name="controller", state="ready"), *rows])

    async def ScaleVision(self, request: pb.ScaleVisionRequest, _context: object) -> pb.ScaleVisionReply:
        names = [f"vision-{i}" for i in range(request.replicas)]
        self.jobs_done = {name: self.jobs_done.get(name, 0) for name in names}
        self.polls_left = POLLS_UNTIL_UP
        print(f"scaled to {request.replicas}", flush=True)
        return pb.ScaleVisionReply(replicas=request.replicas)

    async def Abort(self, _request: pb.AbortRequest, _context: object) -> pb.AbortReply:
        self.aborted.set()
        return pb.AbortReply(outcome="aborted")

    async def Chat(
        self, request: pb.ChatRequest, context: grpc.aio.ServicerContext[pb.ChatRequest, pb.GenerateEvent]
    ) -> AsyncIterator[pb.GenerateEvent]:
        if self.mode == "dies":
            print("out of memory", flush=True)
            sys.stdout.flush()
            signal.raise_signal(signal.SIGKILL)
        if self.mode == "refuses":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        yield pb.GenerateEvent(accepted=pb.Accepted(request_id="r"))
        parts = request.messages[0].parts
        images = [part.image.data for part in parts if part.WhichOneof("part") == "image"]
        endless = not request.stop.HasField("max_tokens")
        words = ["once "] * STORY_TOKENS_MAX if endless else self._reply(images).split(" ")
        reason = "stop"
        for word in words:
            yield pb.GenerateEvent(delta=pb.Delta(token_ids=[7], text=word if endless else f" {word}"))
            await asyncio.sleep(0.01)
            if endless and self.mode == "stalls":
                await self.aborted.wait()
            if endless and self.aborted.is_set():
                reason = "abort"
                break
        yield pb.GenerateEvent(finished=pb.Finished(reason=reason, usage=pb.Usage(completion_tokens=len(words))))

    async def Generate(self, _request: pb.GenerateRequest, _context: object) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(delta=pb.Delta(token_ids=[7], text=" Paris."))
        yield pb.GenerateEvent(finished=pb.Finished(reason="stop", usage=pb.Usage(completion_tokens=1)))

    def _reply(self, images: list[bytes]) -> str:
        if not images:
            return "It is Paris."
        idle = {"vision-1"} if self.mode == "uneven" else set()
        name = min(self.jobs_done.keys() - idle, key=self.jobs_done.__getitem__)
        self.jobs_done[name] += 1
        return "Nothing" if self.mode == "misreads" else ANSWERS[tuple(images)]


async def main() -> None:
    """Serves until SIGINT."""
    mode, config = sys.argv[1], Path(sys.argv[2])
    if mode == "broken":
        sys.exit("cannot start: no such device")
    server = grpc.aio.server()
    fake = FakeServer(mode)
    add_InferenceServicer_to_server(fake, server)
    add_ControlServicer_to_server(fake, server)
    address = yaml.safe_load(config.read_text())["server"]["grpc"]
    server.add_insecure_port(f"{address['host']}:{address['port']}")
    await server.start()
    print("serving", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
    await ended.wait()
    await server.stop(0)
    print("stopped in order", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
