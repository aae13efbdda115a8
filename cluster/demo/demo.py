"""`airside demo`: a server on this machine, real requests over gRPC, vision workers scaled under load, a clean end."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from airside.cluster.config.file import ConfigError, load_config
from airside.cluster.demo.exchange import Exchange
from airside.cluster.demo.screen import Screen
from airside.cluster.demo.server import POLL_S, DemoFailed, DemoServer
from airside.cluster.demo_model.exhibits import exhibits
from airside.cluster.environment import variables
from airside.cluster.model_source import DEMO, ModelSourceError, resolve
from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import ControlStub, InferenceStub

if TYPE_CHECKING:
    from airside.proto.airside_pb2_grpc import ControlAsyncStub, InferenceAsyncStub

QUESTIONS = (
    "What is the capital of Japan?",
    "Write two sentences about the sea.",
    "What is the opposite of hot?",
)
STORY = "Tell me a long story about a small airport at night and the people who work there."
STORY_SEED = 2
STARTUP_TIMEOUT_S = 300.0
SCALE_TIMEOUT_S = 240.0
RIGHT_SHARE_MIN = 0.8  # of the answers about pictures
_ROUNDS_MAX = 6  # rounds of all pictures until every vision worker has had one
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}  # where a server on all addresses is reached
_WORKING = {"ready", "busy"}
_CHANNEL_OPTIONS = [  # a server that is starting is asked again soon
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def run(config_path: Path, keep: bool) -> int:
    """Runs the demo and returns the exit code: 0 when all of it went as it should.

    Args:
        config_path: the YAML file of the server, normally `cluster/local.yaml`.
        keep: no demo; the server stays up until Ctrl-C, and lines to try are printed.
    """
    screen = Screen()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        address = _prepare(config_path, keep, screen)
        with DemoServer(config_path, address, screen.server_news) as server:
            failures = asyncio.run(_serve(server, screen) if keep else _show(server, screen))
            screen.say("shutting down")
            if not server.stop():
                failures.append("the server did not shut down cleanly")
    except (ConfigError, DemoFailed, ModelSourceError) as error:
        failures = [str(error)]
    except grpc.aio.AioRpcError as error:
        failures = [f"the server refused a call: {error.code().name}: {error.details()}"]
    except KeyboardInterrupt:
        failures = [] if keep else ["interrupted"]
    for failure in failures:
        screen.say(f"failed: {failure}")
    if not failures:
        screen.say("done")
    return 1 if failures else 0


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _prepare(config_path: Path, keep: bool, screen: Screen) -> str:
    """Makes the model ready; returns the address the server will have."""
    config = load_config(config_path, variables())
    if config.server.grpc.port == 0:
        raise DemoFailed("server.grpc.port must be a port of its own for the demo, not 0 (any free one)")
    if config.model.source != DEMO and not keep:
        raise DemoFailed(f"the demo shows what the demo model can do; set model.source to {DEMO}, not another model")
    resolve(config.model.source, screen.say)
    host = config.server.grpc.host
    return f"{_LOOPBACK.get(host, host)}:{config.server.grpc.port}"


@dataclass(slots=True)
class _Visit:
    """The connection of one demo to its server, and what has gone wrong so far."""

    server: DemoServer
    screen: Screen
    inference: InferenceAsyncStub
    control: ControlAsyncStub
    failures: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Shows what has come meanwhile. Raises DemoFailed when the server has ended."""
        self.server.check_alive()
        self.screen.refresh()


async def _serve(server: DemoServer, screen: Screen) -> list[str]:
    async with grpc.aio.insecure_channel(server.address, _CHANNEL_OPTIONS) as channel:
        control = ControlStub(channel)
        info = await server.wait_ready(control, STARTUP_TIMEOUT_S)
        await _until_pictures(server, control)
    _introduce(info, server.address, screen)
    screen.say("Try, from another terminal (Ctrl-C here ends the server):")
    body = '{"prompt": "The capital of France is", "stop": {"max_tokens": 16}}'
    screen.say(f"  grpcurl -plaintext -d '{body}' {server.address} airside.v1.Inference/Generate")
    screen.say(f"  {_program()} generate --address {server.address} 'The capital of France is' --max-tokens 16")
    code = await server.wait_ended()
    return [f"the server ended with exit code {code}"]


async def _until_pictures(server: DemoServer, control: ControlAsyncStub) -> None:
    """Waits for the first vision worker, unless none is to come."""
    while True:
        reply = await control.ListWorkers(pb.ListWorkersRequest())
        states = {worker.state for worker in reply.workers if worker.role == "vision_worker"}
        if states & _WORKING or reply.vision_pending or not reply.vision_target:
            return
        server.check_alive()
        await asyncio.sleep(POLL_S)


def _program() -> str:
    """The `airside` command of this environment, as one can type it here."""
    program = Path(sys.executable).with_name("airside")
    if shutil.which("airside") == str(program):
        return "airside"
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else str(program)


async def _show(server: DemoServer, screen: Screen) -> list[str]:
    async with grpc.aio.insecure_channel(server.address, _CHANNEL_OPTIONS) as channel:
        visit = _Visit(server, screen, InferenceStub(channel), ControlStub(channel))
        info = await server.wait_ready(visit.control, STARTUP_TIMEOUT_S)
        await _until_vision(visit, 1)  # text would not wait for it, but the pictures' times would show it
        _introduce(info, server.address, screen)
        requests = await _show_requests(visit)
        pictures, stories = await _show_scaling(visit)
        screen.summary([requests, pictures, stories])
        _judge(visit, requests + pictures)
        return visit.failures


def _introduce(info: pb.ServerInfo, address: str, screen: Screen) -> None:
    screen.say(
        f"ready on {address}: {info.model} ({info.architecture}), {info.dtype} on {info.device}, "
        f"context {info.max_model_len}"
    )


async def _show_requests(visit: _Visit) -> list[Exchange]:
    """Texts and questions about pictures, all at once."""
    exchanges = [Exchange(f"text {i}", question) for i, question in enumerate(QUESTIONS, 1)]
    exchanges += [Exchange.about(exhibit) for exhibit in exhibits()[::4]]
    visit.screen.say(f"{len(exchanges)} requests at once: {len(QUESTIONS)} texts, the others with pictures")
    with visit.screen.watching(exchanges):
        await _run_all(visit, exchanges)
    return exchanges


async def _run_all(visit: _Visit, exchanges: Sequence[Exchange]) -> None:
    pending = {asyncio.ensure_future(exchange.run(visit.inference)) for exchange in exchanges}
    while pending:
        _, pending = await asyncio.wait(pending, timeout=POLL_S)
        visit.look()


async def _show_scaling(visit: _Visit) -> tuple[list[Exchange], list[Exchange]]:
    """Vision workers 1 -> 3 -> 1 while a story streams; returns the exchanges with pictures and the stories."""
    visit.screen.say(
        f"vision workers 1 -> 3, {len(exhibits())} questions about pictures at once, 3 -> 1, all while a story streams"
    )
    stories: list[Exchange] = []
    telling = asyncio.create_task(_keep_telling(visit, stories))
    try:
        with visit.screen.watching(stories):
            await _until_told(visit, stories)
            tokens_before = _num_tokens(stories)
            await _scale(visit, 3)
            pictures, counts = await _share_pictures(visit)
            await _scale(visit, 1)
            tokens_meanwhile = _num_tokens(stories) - tokens_before
            await _stop_telling(visit, telling, stories)
    finally:
        telling.cancel()
    for name, count in sorted(counts.items()):
        visit.screen.say(f"  {name}: {_counted(count, 'picture')}")
        if count == 0:
            visit.failures.append(f"vision worker {name} got no picture")
    _judge_stories(visit, stories, tokens_meanwhile)
    return pictures, stories


async def _share_pictures(visit: _Visit) -> tuple[list[Exchange], dict[str, int]]:
    """Sends rounds of all pictures until each vision worker has had one; the first round, and pictures by worker."""
    first: list[Exchange] = []
    for _ in range(_ROUNDS_MAX):
        batch = [Exchange.about(exhibit) for exhibit in exhibits()]
        await _run_all(visit, batch)
        first = first or batch
        counts = {worker.name: worker.jobs_done for worker in await _vision_workers(visit)}
        if all(counts.values()):
            break
    return first, counts


async def _scale(visit: _Visit, replicas: int) -> None:
    """Asks for that many vision workers and waits until they are there."""
    began = time.monotonic()
    await visit.control.ScaleVision(pb.ScaleVisionRequest(replicas=replicas))
    visit.screen.say(f"  asked for {_counted(replicas, 'vision worker')}")
    await _until_vision(visit, replicas)
    visit.screen.say(f"  {_counted(replicas, 'vision worker')} after {time.monotonic() - began:.1f} s")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


async def _until_vision(visit: _Visit, replicas: int) -> None:
    """Waits until exactly that many vision workers are up and no other is left. Raises DemoFailed after a while."""
    deadline = asyncio.get_running_loop().time() + SCALE_TIMEOUT_S
    while [worker.state in _WORKING for worker in await _vision_workers(visit)] != [True] * replicas:
        visit.look()
        if asyncio.get_running_loop().time() > deadline:
            raise DemoFailed(f"there were not {replicas} vision workers within {SCALE_TIMEOUT_S:.0f} s")
        await asyncio.sleep(POLL_S)


async def _vision_workers(visit: _Visit) -> list[pb.Worker]:
    reply = await visit.control.ListWorkers(pb.ListWorkersRequest())
    return [worker for worker in reply.workers if worker.role == "vision_worker" and worker.state != "lost"]


async def _keep_telling(visit: _Visit, stories: list[Exchange]) -> None:
    """Streams one story after another until one is aborted; there is always one on its way."""
    while not any(story.error or _aborted(story) for story in stories):
        seed = STORY_SEED + len(stories)
        sampling = pb.Sampling(temperature=0.8, top_p=0.9, seed=seed)
        story = Exchange(f"story {len(stories) + 1}", STORY, max_tokens=None, sampling=sampling)
        stories.append(story)
        await story.run(visit.inference)


async def _until_told(visit: _Visit, stories: Sequence[Exchange]) -> None:
    """Waits for the first token. Raises DemoFailed when the story fails instead."""
    while not _num_tokens(stories):
        visit.look()
        if stories and stories[-1].error:
            raise DemoFailed(f"the story did not start: {stories[-1].error}")
        await asyncio.sleep(POLL_S)


async def _stop_telling(visit: _Visit, telling: asyncio.Task[None], stories: Sequence[Exchange]) -> None:
    """Aborts the story by its id, as an operator would, and waits for its end."""
    while not telling.done():
        if stories[-1].request_id:
            await visit.control.Abort(pb.AbortRequest(request_id=stories[-1].request_id))
        await asyncio.wait([telling], timeout=1)
    await telling


def _aborted(story: Exchange) -> bool:
    return story.finished is not None and story.finished.reason == "abort"


def _num_tokens(stories: Sequence[Exchange]) -> int:
    return sum(story.num_tokens for story in stories)


def _judge_stories(visit: _Visit, stories: Sequence[Exchange], tokens_meanwhile: int) -> None:
    """The story must have gone on while the pool changed, and ended by itself or by the abort."""
    pause = max(story.longest_pause_s for story in stories)
    visit.screen.say(f"  meanwhile the story went on: {tokens_meanwhile} tokens, longest pause {pause:.2f} s")
    if tokens_meanwhile == 0:
        visit.failures.append("the story stood still while the vision workers changed")
    visit.failures += [f"{story.name}: {_end(story)}" for story in stories if not (story.ok or _aborted(story))]


def _judge(visit: _Visit, exchanges: Sequence[Exchange]) -> None:
    """Every request must have ended by itself, and most answers about pictures must be right."""
    visit.failures += [f"{exchange.name}: {_end(exchange)}" for exchange in exchanges if not exchange.ok]
    shown = {exchange.name: exchange for exchange in exchanges if exchange.exhibit is not None}
    num_right = sum(exchange.is_right for exchange in shown.values())
    visit.screen.say(f"{num_right} of {len(shown)} answers about held-out pictures are right")
    if num_right < RIGHT_SHARE_MIN * len(shown):
        visit.failures.append(f"only {num_right} answers about pictures were right")


def _end(exchange: Exchange) -> str:
    if exchange.finished is None:
        return exchange.error
    return f"{exchange.finished.reason} {exchange.finished.detail}".strip()
