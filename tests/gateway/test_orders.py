"""One call of several sequences, and all that can happen to them, in many orders. A run is a function of its seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import zmq

from airside.controller.gateway import streams
from airside.controller.gateway.controller_link import ControllerLink
from airside.controller.gateway.errors import ControllerSilent, RequestError
from airside.controller.gateway.grammar_check import GrammarChecker
from airside.controller.gateway.inference import Inference
from airside.controller.gateway.prompt import Prompt
from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.terms import TermsReader
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import messages as msg
from tests.gateway.conftest import make_settings
from tests.gateway.scripted_controller import batch, finish
from tests.gateway.tiny_checkpoint import byte_level_tokenizer, write_checkpoint

TOKENS = [byte_level_tokenizer().token_to_id(char) for char in "aab"]
TURNS = 60
BUFFERED_MAX = 6  # so that a reader is soon too slow


class Bus:
    """The gateway's end. While it is full, nothing can be sent."""

    name = "gateway-0"

    def __init__(self) -> None:
        self.sent: list[msg.Message] = []
        self.full = False

    def send(self, message: msg.Message, _attachments: Sequence[object] = ()) -> None:
        if self.full:
            raise zmq.Again
        self.sent.append(message)

    async def receive(self) -> NoReturn:
        raise AssertionError("the test hands on what the controller says")


class Controller:
    """Takes what the gateway has sent, in order, some of it in each turn; makes tokens and ends as it pleases."""

    def __init__(self, rng: random.Random, bus: Bus, link: ControllerLink) -> None:
        self._rng = rng
        self._bus = bus
        self._link = link
        self._live: set[int] = set()
        self.seq_ids: list[int] = []
        self.made: dict[int, list[int]] = {}
        self.rejects = rng.random() < 0.2
        self.is_dead = False

    def turn(self) -> None:
        if self.is_dead:
            return
        for _ in range(self._rng.randint(0, 3)):
            if self._bus.sent:
                self._take(self._bus.sent.pop(0))
        rows = [
            (i, self._rng.choices(TOKENS, k=self._rng.randint(1, 3))) for i in self._live if self._rng.random() < 0.5
        ]
        for seq_id, ids in rows:
            self.made[seq_id] += ids
        ended = [i for i in self._live if self._rng.random() < 0.04]
        self._say(batch(*rows, finished=[self._end(i, self._rng.choice(["stop", "length", "abort"])) for i in ended]))

    def die(self) -> None:
        self.is_dead = True
        self._link.streams.lose_all("the controller is gone")

    def take_all(self) -> set[int]:
        """The sequences that are live once everything that was sent is taken."""
        while self._bus.sent:
            self._take(self._bus.sent.pop(0))
        return self._live

    def _take(self, message: msg.Message) -> None:
        match message:
            case msg.AddRequest(seq_id=seq_id) if self.rejects and self._rng.random() < 0.3:
                self.seq_ids.append(seq_id)
                self._say(msg.Rejected(seq_id, "queue_full", "too many"))
            case msg.AddRequest(seq_id=seq_id):
                self.seq_ids.append(seq_id)
                self.made[seq_id] = []
                self._live.add(seq_id)
                self._say(msg.Accepted(seq_id, 0))
            case msg.AbortSequence(seq_id=seq_id) if seq_id in self._live:
                self._say(batch(finished=[self._end(seq_id, "abort")]))
            case msg.StopSequence(seq_id=seq_id) if seq_id in self._live:
                self._say(batch(finished=[self._end(seq_id, "stop")]))

    def _end(self, seq_id: int, reason: str) -> msg.FinishedRow:
        self._live.discard(seq_id)
        return finish(seq_id, reason)

    def _say(self, message: msg.Message) -> None:
        self._link.streams.dispatch(message)


class Run:
    """One call from beginning to end."""

    def __init__(self, seed: int, model: TextModel, inference: Any, link: ControllerLink, bus: Bus) -> None:
        self._rng = random.Random(seed)
        self.n = self._rng.randint(1, 4)
        strings, min_tokens = self._rng.choice([[], ["b"], ["ab"]]), self._rng.choice([0, 3])
        request = pb.GenerateRequest(n=self.n, stop=pb.Stop(strings=strings, min_tokens=min_tokens))
        self._terms = TermsReader(make_settings(Path(), Path()), model).read(request, 100, time.time())
        self._inference = inference
        self._link = link
        self._bus = bus
        self._slowness = self._rng.choice([0, 0, 1, 6])
        self.controller = Controller(self._rng, bus, link)
        self.events: list[pb.GenerateEvent] = []
        self.outcome: BaseException | None = None
        self.was_cancelled = False

    async def run(self) -> None:
        context = SimpleNamespace(write=self._write)
        call = asyncio.create_task(self._inference._stream(self._terms, Prompt([TOKENS[0]], [], []), context))
        dies_at, cancelled_at, full_at = (
            self._rng.choice([None, None, self._rng.randrange(1, TURNS)]) for _ in range(3)
        )
        for turn in range(TURNS):
            self._bus.full = full_at is not None and full_at <= turn < full_at + 5
            if turn == dies_at:
                self.controller.die()
            if turn == cancelled_at:
                self.was_cancelled = call.cancel()
            self.controller.turn()
            await asyncio.sleep(0)
        if not self.controller.is_dead and not call.done():
            self.controller.die()  # however long it would have gone on
        async with asyncio.timeout(20):
            [self.outcome] = await asyncio.gather(call, return_exceptions=True)
        self._bus.full = False
        self._link._beat()  # with what could not be sent before

    async def _write(self, event: pb.GenerateEvent) -> None:
        for _ in range(self._rng.randint(0, self._slowness)):
            await asyncio.sleep(0)
        self.events.append(event)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TOKENS_MAX", BUFFERED_MAX)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize(
    "first_seed", [0, 100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(200, 1000, 100))]
)
def test_every_order_ends_each_sequence_once(model: TextModel, first_seed: int) -> None:
    settings = make_settings(Path(), Path())
    with contextlib.closing(GrammarChecker(settings, model)) as grammars:
        for seed in range(first_seed, first_seed + 100):
            bus = Bus()
            metrics = RequestMetrics()
            link = ControllerLink(bus, msg.GatewayHello("local", 1), metrics)
            run = Run(seed, model, Inference(settings, model, link, grammars, metrics), link, bus)
            asyncio.run(run.run())
            try:
                check(run)
                check_counts(run, metrics)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {run.outcome!r} after {run.events}") from error
            assert len(link.streams) == 0


def check_counts(run: Run, metrics: RequestMetrics) -> None:
    """Each sequence of a call that was accepted has ended once for the metrics, for the reason its client was told."""
    counted = {
        sample.labels["reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "airside_requests_finished_total" and sample.value
    }
    kinds = [event.WhichOneof("event") for event in run.events]
    told = Counter(event.finished.reason for event in run.events if event.WhichOneof("event") == "finished")
    assert sum(counted.values()) in ((run.n,) if kinds else (0, run.n)), counted  # cancelled as `accepted` was written
    assert all(counted.get(reason, 0) >= count for reason, count in told.items()), (counted, told)
    assert run.was_cancelled or counted == told, (counted, told)


def check(run: Run) -> None:
    kinds = [event.WhichOneof("event") for event in run.events]
    ends = {event.finished.index: event.finished for event in run.events if event.WhichOneof("event") == "finished"}
    assert len(ends) == kinds.count("finished"), "an index has two ends"
    assert kinds.count("accepted") == (1 if kinds else 0)
    assert kinds[:1] in ([], ["accepted"])
    match run.outcome:
        case asyncio.CancelledError():
            assert run.was_cancelled
        case None:
            assert {end.reason for end in ends.values()} <= {"stop", "length"}
        case RequestError() if kinds:
            assert {end.reason for end in ends.values()} >= {"abort"}
        case other:
            assert isinstance(other, RequestError | ControllerSilent)
    if kinds and not run.was_cancelled:
        assert ends.keys() == set(range(run.n)), "an index has no end"
    for index, seq_id in enumerate(run.controller.seq_ids):
        check_tokens(run, index, ends.get(index), run.controller.made.get(seq_id, []))
    if not run.controller.is_dead:
        assert run.controller.take_all() == set(), "the controller has sequences that nobody reads"


def check_tokens(run: Run, index: int, end: pb.Finished | None, made: list[int]) -> None:
    """They are what was made, in order, and all of it where nothing cut it short; nothing comes after the end."""
    places = [i for i, e in enumerate(run.events) if e.WhichOneof("event") == "delta" and e.delta.index == index]
    got = [token_id for i in places for token_id in run.events[i].delta.token_ids]
    assert got == made[: len(got)]
    if end is None:
        return
    if end.reason in ("stop", "length") and not end.stop_match:
        assert got == made
    assert all(
        not event.HasField("finished") or event.finished != end for event in run.events[: max(places, default=0)]
    )
