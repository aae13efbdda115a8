"""The vision ledger without sockets: what it asks for, event by event, and its invariants under any order of events."""

from __future__ import annotations

from collections import Counter, deque
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from airside.controller.vision_ledger import (
    Effect,
    PixelsReady,
    SegmentUnused,
    Send,
    ShapeKnown,
    VisionFailed,
    VisionLedger,
)
from airside.proto.messages import Cancel, Drain, ImageFailed, Job, Pixels, PixelsRef, Release, Shape

E = TypeVar("E")
NOW = 100.0


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def jobs(effects: list[Effect]) -> list[tuple[str, tuple[int, int, int]]]:
    return [
        (s.peer, (s.message.seq_id, s.message.image_index, s.message.epoch))
        for s in of(Send, effects)
        if isinstance(s.message, Job)
    ]


def ledger_with(*workers: tuple[str, int], attempts_max: int = 3) -> VisionLedger:
    ledger = VisionLedger(attempts_max)
    for name, credits in workers:
        ledger.join(name, f"airside-t-{name}")
        ledger.credit(name, credits, NOW)
    return ledger


def images(count: int) -> list[memoryview]:
    return [memoryview(b"image %d" % index) for index in range(count)]


def shape(seq_id: int, index: int, epoch: int) -> Shape:
    return Shape(seq_id, index, epoch, b"\x07\0\0\0" * 5)


def pixels(worker: str, seq_id: int, index: int, epoch: int, slab: int = 0) -> Pixels:
    return Pixels(seq_id, index, epoch, PixelsRef(f"airside-t-{worker}", slab, 64, []), 0.25)


def ready(ledger: VisionLedger, worker: str, seq_id: int, index: int, epoch: int, slab: int = 0) -> list[Effect]:
    effects = ledger.shape(worker, shape(seq_id, index, epoch), NOW)
    return effects + ledger.pixels_in(worker, pixels(worker, seq_id, index, epoch, slab), NOW)


def test_an_image_goes_from_job_to_release() -> None:
    ledger = ledger_with(("v0", 1))
    effects = ledger.add(1, images(1), NOW)
    assert jobs(effects) == [("v0", (1, 0, 1))]
    assert bytes(of(Send, effects)[0].attachments[0]) == b"image 0"
    assert ledger.shape("v0", shape(1, 0, 1), NOW) == [ShapeKnown(1, 0, b"\x07\0\0\0" * 5)]
    assert ledger.pixels_in("v0", pixels("v0", 1, 0, 1, slab=4096), NOW) == [PixelsReady(1, 0, 5, 0.25)]
    assert ledger.pixels(1, 0).slab == 4096
    assert ledger.end(1) == [Send("v0", Release(4096))]
    assert ledger.jobs_done() == {"v0": 1}
    ledger.check()


def test_jobs_go_to_the_worker_with_the_fewest_in_hand_and_wait_without_credit() -> None:
    ledger = ledger_with(("v0", 2), ("v1", 1))
    assert jobs(ledger.add(1, images(4), NOW)) == [("v0", (1, 0, 1)), ("v1", (1, 1, 1)), ("v0", (1, 2, 1))]
    assert ledger.num_queued == 1
    assert jobs(ledger.credit("v1", 1, NOW)) == [("v1", (1, 3, 1))]


def test_a_slab_in_a_step_in_flight_is_kept_until_the_step_is_over() -> None:
    ledger = ledger_with(("v0", 1))
    ledger.add(1, images(1), NOW)
    ready(ledger, "v0", 1, 0, 1, slab=8)
    ledger.begin_step([1])
    assert ledger.end(1) == []
    assert ledger.close_step() == [Send("v0", Release(8))]


def test_each_slab_is_kept_until_no_step_in_flight_reads_it() -> None:
    ledger = ledger_with(("v0", 3))
    for seq_id in (1, 2, 3):
        ledger.add(seq_id, images(1), NOW)
        ready(ledger, "v0", seq_id, 0, 1, slab=8 * seq_id)
    ledger.begin_step([1, 2])
    ledger.begin_step([2, 3])
    assert [*ledger.end(1), *ledger.end(2), *ledger.end(3)] == []
    ledger.check()
    assert ledger.close_step() == [Send("v0", Release(8))]
    assert ledger.close_step() == [Send("v0", Release(16)), Send("v0", Release(24))]


def test_lost_steps_keep_nothing() -> None:
    ledger = ledger_with(("v0", 1))
    ledger.add(1, images(1), NOW)
    ready(ledger, "v0", 1, 0, 1, slab=8)
    ledger.begin_step([1])
    ledger.begin_step([1])
    ledger.end(1)
    assert ledger.drop_steps() == [Send("v0", Release(8))]
    assert ledger.drop_steps() == []


def test_a_lost_worker_costs_a_second_try_elsewhere_at_the_head_of_the_queue() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 0))
    ledger.add(1, images(2), NOW)
    assert ledger.lose("v0", NOW) == [SegmentUnused("airside-t-v0")]
    assert jobs(ledger.credit("v1", 1, NOW)) == [("v1", (1, 0, 2))]


def test_an_image_that_lost_a_worker_is_tried_alone() -> None:
    ledger = ledger_with(("v0", 2), ("v1", 4))
    ledger.add(1, images(1), NOW)
    ledger.add(2, images(1), NOW)
    ledger.add(3, images(1), NOW)  # v0 and v1 have one job each, and then v0 a second
    effects = ledger.lose("v0", NOW)
    assert jobs(effects) == []  # v1 still has sequence 2's image in hand
    assert jobs(ready(ledger, "v1", 2, 0, 1)) == [("v1", (1, 0, 2))]
    assert jobs(ready(ledger, "v1", 1, 0, 2)) == [("v1", (3, 0, 2))]


def test_an_image_that_killed_three_workers_fails() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1), ("v2", 1), ("v3", 1))
    ledger.add(1, images(1), NOW)
    assert jobs(ledger.lose("v0", NOW)) == [("v1", (1, 0, 2))]
    assert jobs(ledger.lose("v1", NOW)) == [("v2", (1, 0, 3))]
    effects = ledger.lose("v2", NOW)
    assert jobs(effects) == []
    assert of(VisionFailed, effects) == [VisionFailed(1, "image 0: three vision workers died on it")]


def test_stale_messages_are_harmless_and_a_stale_slab_goes_straight_back() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1))
    ledger.add(1, images(1), NOW)
    ledger.lose("v0", NOW)
    assert ledger.shape("v0", shape(1, 0, 1), NOW) == []
    assert ledger.image_failed("v0", ImageFailed(1, 0, 1, "truncated", "it ends early"), NOW) == []
    assert ledger.pixels_in("v0", pixels("v0", 1, 0, 1, slab=16), NOW) == [Send("v0", Release(16))]
    assert ledger.pixels_in("v1", pixels("v1", 1, 0, 1, slab=32), NOW) == [Send("v1", Release(32))]
    assert of(PixelsReady, ready(ledger, "v1", 1, 0, 2)) == [PixelsReady(1, 0, 5, 0.25)]
    assert ledger.pixels_in("v1", pixels("v1", 1, 0, 2, slab=64), NOW) == [Send("v1", Release(64))]
    ledger.check()


def test_the_shape_is_told_once_however_many_attempts() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1))
    ledger.add(1, images(1), NOW)
    assert of(ShapeKnown, ledger.shape("v0", shape(1, 0, 1), NOW))
    ledger.lose("v0", NOW)
    assert ledger.shape("v1", shape(1, 0, 2), NOW) == []


def test_a_failed_image_says_which_and_why() -> None:
    ledger = ledger_with(("v0", 3))
    ledger.add(1, images(3), NOW)
    effects = ledger.image_failed("v0", ImageFailed(1, 2, 1, "truncated", "the file ends early"), NOW)
    assert effects == [VisionFailed(1, "image 2: truncated: the file ends early")]
    assert {(s.message.image_index) for s in of(Send, ledger.end(1)) if isinstance(s.message, Cancel)} == {0, 1}


def test_pixels_before_their_shape_fail_the_image() -> None:
    ledger = ledger_with(("v0", 1))
    ledger.add(1, images(1), NOW)
    effects = ledger.pixels_in("v0", pixels("v0", 1, 0, 1, slab=8), NOW)
    assert effects == [
        Send("v0", Release(8)),
        VisionFailed(1, "image 0: the vision worker sent pixels without a shape"),
    ]


def test_abort_cancels_what_is_in_hand_and_forgets_what_waits() -> None:
    ledger = ledger_with(("v0", 1))
    ledger.add(1, images(2), NOW)
    assert ledger.end(1) == [Send("v0", Cancel(1, 0, 1))]
    assert ledger.num_queued == 0
    assert ledger.pixels_in("v0", pixels("v0", 1, 0, 1, slab=8), NOW) == [Send("v0", Release(8))]
    ledger.check()


def test_pixels_outlive_their_worker_until_the_last_lease_is_back() -> None:
    ledger = ledger_with(("v0", 2))
    ledger.add(1, images(1), NOW)
    ledger.add(2, images(1), NOW)
    ready(ledger, "v0", 1, 0, 1, slab=0)
    ready(ledger, "v0", 2, 0, 1, slab=64)
    assert ledger.lose("v0", NOW) == []
    assert ledger.pixels(2, 0).slab == 64
    assert ledger.needs_segment_of("v0")
    assert ledger.is_orphan("airside-t-v0")
    assert ledger.end(1) == []
    assert ledger.end(2) == [SegmentUnused("airside-t-v0")]
    assert not ledger.needs_segment_of("v0")


def test_a_draining_worker_gets_no_more_jobs_but_its_slabs_back() -> None:
    ledger = ledger_with(("v0", 2))
    ledger.add(1, images(1), NOW)
    assert ledger.drain("v0") == [Send("v0", Drain())]
    assert ledger.drain("v0") == []
    assert jobs(ledger.add(2, images(1), NOW)) == [] == ledger.credit("v0", 1, NOW)
    assert ledger.num_workers == 0
    ready(ledger, "v0", 1, 0, 1, slab=8)
    assert ledger.end(1) == [Send("v0", Release(8))]


@pytest.mark.parametrize(("quiet_s", "stuck"), [(59.0, []), (61.0, ["v0"])])
def test_a_worker_without_progress_is_stuck(quiet_s: float, stuck: list[str]) -> None:
    ledger = ledger_with(("v0", 1), ("idle", 0))
    ledger.add(1, images(1), NOW)
    assert ledger.stuck(NOW + quiet_s, 60.0) == stuck


def test_a_worker_that_may_wait_for_room_is_not_stuck_until_its_slabs_are_back() -> None:
    ledger = ledger_with(("v0", 2))
    ledger.add(1, images(1), NOW)
    ledger.add(2, images(1), NOW)
    ready(ledger, "v0", 1, 0, 1)
    assert ledger.stuck(NOW + 100, 60.0) == []
    ledger.end(1)
    assert ledger.stuck(NOW + 150, 60.0) == []
    assert ledger.stuck(NOW + 161, 60.0) == ["v0"]


class LedgerMachine(RuleBasedStateMachine):
    """Random events; the model only counts what must happen exactly once."""

    @initialize(attempts_max=st.integers(1, 3))
    def start(self, attempts_max: int) -> None:
        self.ledger = VisionLedger(attempts_max)
        self.next_id = 0
        self.live: dict[int, int] = {}  # seq_id -> number of images
        self.in_hand: dict[str, dict[tuple[int, int], int]] = {}  # worker -> key -> epoch, as the worker sees it
        self.credits: Counter[str] = Counter()
        self.segments: dict[str, str] = {}
        self.shaped: Counter[tuple[int, int]] = Counter()
        self.ended: Counter[tuple[int, int]] = Counter()  # ready or failed
        self.out: set[tuple[str, int]] = set()  # (segment, slab) that the ledger has
        self.unlinked: set[str] = set()
        self.seq_of: dict[int, int] = {}  # by slab
        self.steps: deque[frozenset[int]] = deque()  # in flight

    def id(self) -> int:
        self.next_id += 1
        return self.next_id

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, Job() as job):
                    assert self.credits[peer] > 0
                    self.credits[peer] -= 1
                    self.in_hand[peer][job.seq_id, job.image_index] = job.epoch
                case Send(peer, Cancel() as cancel):
                    assert self.in_hand[peer].pop((cancel.seq_id, cancel.image_index)) == cancel.epoch
                case Send(peer, Release() as release):
                    self.out.remove((self.segments[peer], release.slab))
                    assert not any(self.seq_of[release.slab] in step for step in self.steps), "it is still read"
                case ShapeKnown():
                    self.shaped[effect.seq_id, effect.image_index] += 1
                case PixelsReady():
                    assert self.shaped[effect.seq_id, effect.image_index] == 1
                    self.ended[effect.seq_id, effect.image_index] += 1
                case VisionFailed():
                    self.ended[effect.seq_id, int(effect.detail.split()[1].rstrip(":"))] += 1
                case SegmentUnused(segment):
                    assert segment not in self.unlinked
                    assert segment not in self.segments.values()
                    self.unlinked.add(segment)
                    self.out = {(owner, slab) for owner, slab in self.out if owner != segment}

    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        seq_id = self.id()
        self.live[seq_id] = count
        self.note(self.ledger.add(seq_id, images(count), NOW))

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def end(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.live)))
        held = {(seq_id, index) for index in range(self.live.pop(seq_id))}
        self.note(self.ledger.end(seq_id))
        assert not any(held & set(hand) for hand in self.in_hand.values())

    @rule()
    @precondition(lambda self: len(self.in_hand) < 3)
    def join(self) -> None:
        name = f"v{self.id()}"
        self.in_hand[name], self.segments[name] = {}, f"airside-t-{name}"
        self.ledger.join(name, self.segments[name])

    @rule(data=st.data(), count=st.integers(1, 2))
    @precondition(lambda self: self.in_hand)
    def credit(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.in_hand)))
        self.credits[name] += count
        before = self.credits[name]
        self.note(self.ledger.credit(name, count, NOW))
        assert self.credits[name] <= before

    @rule(data=st.data())
    @precondition(lambda self: self.in_hand)
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.in_hand)))
        del self.in_hand[name], self.segments[name]
        self.credits[name] = 0
        self.note(self.ledger.lose(name, NOW))

    @rule(data=st.data(), stale=st.booleans(), what=st.sampled_from(["shape", "pixels", "failed"]))
    @precondition(lambda self: any(self.in_hand.values()))
    def speak(self, data: st.DataObject, stale: bool, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, hand in self.in_hand.items() if hand)))
        key = data.draw(st.sampled_from(sorted(self.in_hand[name])))
        epoch = self.in_hand[name][key] + stale
        if what == "shape":
            self.note(self.ledger.shape(name, shape(*key, epoch), NOW))
            return
        if not stale:
            del self.in_hand[name][key]
        if what == "failed":
            self.note(self.ledger.image_failed(name, ImageFailed(*key, epoch, "c", "d"), NOW))
            return
        slab = self.id()
        self.out.add((self.segments[name], slab))
        effects = self.ledger.pixels_in(name, pixels(name, *key, epoch, slab), NOW)
        self.seq_of[slab] = key[0] if of(PixelsReady, effects) else 0  # what was not taken is read by nobody
        self.note(effects)
        assert not stale or (self.segments[name], slab) not in self.out

    @rule(data=st.data())
    @precondition(lambda self: len(self.steps) < 2)
    def begin_step(self, data: st.DataObject) -> None:
        self.steps.append(frozenset(seq_id for seq_id in self.live if data.draw(st.booleans())))
        self.ledger.begin_step(self.steps[-1])

    @rule()
    @precondition(lambda self: self.steps)
    def close_step(self) -> None:
        self.steps.popleft()
        self.note(self.ledger.close_step())

    @rule()
    def drop_steps(self) -> None:
        self.steps.clear()
        self.note(self.ledger.drop_steps())

    @invariant()
    def consistent(self) -> None:
        self.ledger.check()
        assert all(count == 1 for count in (*self.shaped.values(), *self.ended.values()))

    def finish_all(self) -> None:
        """A worker that never tires does whatever is left."""
        for name in list(self.in_hand):
            del self.in_hand[name], self.segments[name]
            self.note(self.ledger.lose(name, NOW))
        self.join()
        (name,) = self.in_hand
        self.credits[name] = 10_000
        self.note(self.ledger.credit(name, 10_000, NOW))
        while self.in_hand[name]:
            key, epoch = self.in_hand[name].popitem()
            slab = self.id()
            self.out.add((self.segments[name], slab))
            self.seq_of[slab] = key[0]
            self.note(self.ledger.shape(name, shape(*key, epoch), NOW))
            self.note(self.ledger.pixels_in(name, pixels(name, *key, epoch, slab), NOW))

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.finish_all()
        keys = [(seq_id, index) for seq_id, count in self.live.items() for index in range(count)]
        assert all(self.ended[key] == 1 for key in keys), "an image was forgotten"
        for seq_id in self.live:  # whoever is still alive ends, and then nothing is left over
            self.note(self.ledger.end(seq_id))
        self.drop_steps()
        for name in list(self.in_hand):
            del self.in_hand[name], self.segments[name]
            self.note(self.ledger.lose(name, NOW))
        assert not self.out
        assert self.ledger.num_queued == 0
        self.ledger.check()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
