"""The model worker: one rank. Receives step plans, executes them, answers from rank 0."""

from __future__ import annotations

import logging
import os
import time

import psutil
import torch

from airside.proto.channel import Envelope, Link
from airside.proto.garbage import keep_what_is_loaded
from airside.proto.messages import (
    CloseGrammar,
    DropPixels,
    Heartbeat,
    KvSetup,
    OpenGrammar,
    PixelsParcel,
    Shutdown,
    StepPlan,
    WorkerFailed,
    WorkerHello,
)
from airside.proto.settings import WorkerSettings
from airside.workers.load import device_of, load_runner
from airside.workers.model_config import CheckpointError
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from airside.workers.weights.load_times import START_UP, LoadTimes

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


class Worker:
    """One rank with its model loaded."""

    def __init__(
        self, settings: WorkerSettings, link: Link, runner: ModelRunner, arena: PixelArena, parent_pid: int
    ) -> None:
        self._settings = settings
        self._link = link
        self._runner = runner
        self._grammars = runner.grammars
        self._arena = arena
        self._parent_pid = parent_pid
        self._process = psutil.Process()
        self._last_heartbeat_s = 0.0

    def run(self, load_s: float, times: LoadTimes) -> None:
        """Serves until told to stop, or until the process that started this one is gone."""
        if self._grammars is not None:
            self._link.watch(self._grammars.wake_fd)
        log.info("%s%s", START_UP, times)  # before the hello, after which others may look for it
        self._say_hello(load_s)
        while os.getppid() == self._parent_pid:
            envelope = self._link.receive(timeout_ms=int(_HEARTBEAT_S * 1000))
            if envelope is not None and isinstance(envelope.message, Shutdown):
                log.info("shutdown why=%r", envelope.message.why)
                return
            if envelope is not None:
                self._handle(envelope)
            self._answer_for_grammars()
            self._show_life()
        log.warning("orphaned parent_pid=%d; nobody is left to serve, exiting", self._parent_pid)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.message:
            case StepPlan() as plan:
                self._step(plan)
            case PixelsParcel() as parcel:
                self._arena.keep(parcel, envelope.attachments)
            case DropPixels(segment, slab):
                self._arena.drop(segment, slab)
            case OpenGrammar(seq_id, grammar, output_ids) if self._grammars is not None:
                self._grammars.open(seq_id, grammar, output_ids)
            case CloseGrammar(seq_id) if self._grammars is not None:
                self._grammars.close(seq_id)
            case KvSetup(num_blocks):
                times = LoadTimes()
                with times.phase("allocate"):
                    self._runner.allocate(num_blocks)
                log.info("allocated num_blocks=%d %s", num_blocks, times)
            case other:
                raise TypeError(f"a worker was sent {type(other).__name__}")

    def _say_hello(self, load_s: float) -> None:
        settings = self._settings
        num_blocks = self._runner.count_kv_blocks()
        self._link.send(
            WorkerHello(
                rank=settings.rank,
                world_size=settings.world_size,
                group=settings.group,
                node=settings.node,
                pid=os.getpid(),
                num_blocks=num_blocks,
                load_s=load_s,
                num_state_slots=self._runner.num_state_slots,
            )
        )
        log.info(
            "loaded rank=%d of=%d kv_blocks=%d load_s=%.2f", settings.rank, settings.world_size, num_blocks, load_s
        )

    def _step(self, plan: StepPlan) -> None:
        result = self._runner.execute(plan)
        # A grammar that failed in this step ends its sequence in its own words; the result has no more than -2 for it.
        self._answer_for_grammars()
        if result is not None:
            self._link.send(result)

    def _answer_for_grammars(self) -> None:
        """Says which are built, and which have failed."""
        if self._grammars is not None:
            for answer in self._grammars.poll():
                self._link.send(answer)

    def _show_life(self) -> None:
        """Between steps too, and on rank 0 beside its results: nothing else tells how much memory is in use."""
        now_s = time.monotonic()
        if now_s - self._last_heartbeat_s >= _HEARTBEAT_S:
            self._last_heartbeat_s = now_s
            self._link.send(Heartbeat(rss_bytes=self._process.memory_info().rss))


def run_worker(settings: WorkerSettings, parent_pid: int, times: LoadTimes) -> int:
    """Loads a rank, serves it, and returns the exit status: 0 after a shutdown, 1 after a failure told to the bus.

    Args:
        parent_pid: `os.getppid()` as early as can be: the parent may die while the weights load.
        times: what has been done before.
    """
    torch.set_num_threads(settings.num_threads)
    link = Link(settings.endpoint, settings.name)
    try:
        started_s = time.perf_counter()
        with times.phase("meet"):
            group = RankGroup.connect(settings.rank, settings.world_size, settings.rendezvous, device_of(settings))
        arena = PixelArena()
        runner = load_runner(settings, group, arena, times)
        worker = Worker(settings, link, runner, arena, parent_pid)
        keep_what_is_loaded()
        worker.run(time.perf_counter() - started_s, times)
        group.close()
    except Exception as error:
        # The controller cannot see this process' log; it gets the reason in one line, the log gets the rest.
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        is_users = isinstance(error, CheckpointError)  # says all there is to say; a trace would bury it
        log.error("failed rank=%d %s; exiting", settings.rank, detail, exc_info=None if is_users else error)
        link.send(WorkerFailed(settings.rank, detail))
        return 1
    finally:
        link.close()
    return 0
