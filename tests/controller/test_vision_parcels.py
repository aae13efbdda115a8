"""Pixels of vision workers that share no memory with the ranks: they come as frames, and the ranks are sent them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from airside.controller.vision.effects import ParcelUnused, PixelsReady, SegmentUnused, Send, VisionFailed
from airside.controller.vision.ledger import VisionLedger
from airside.controller.vision.parcels import Parcels
from airside.controller.vision.pixel_cache import Slab
from airside.controller.vision.pixel_jobs import KnownShape
from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.ledger_script import (
    ARENA_BYTES,
    CACHING,
    EXPANSION,
    NOW,
    add,
    files,
    known,
    ledger_with,
    of,
    pixels,
)
from tests.controller.scripted import IMAGE_TOKEN, Gateway, Rank, VisionWorker
from tests.controller.test_vision import lose, serving

PIXELS = bytes(range(64))
OTHERS = bytes(range(64, 128))


def frames(*contents: bytes) -> list[memoryview]:
    return [memoryview(content) for content in contents]


# --- what the ranks have ------------------------------------------------------------------------------------------


def slab(offset: int, data: bytes | None, segment: str = "airside-t-v0") -> Slab:
    ref = msg.PixelsRef(segment, offset, 64, [])
    return Slab(ref, KnownShape(EXPANSION, 1), b"", None if data is None else memoryview(data))


def test_a_slab_is_sent_once_and_again_when_another_is_in_its_place() -> None:
    parcels, first, mapped = Parcels(), slab(0, PIXELS), slab(64, None)
    assert parcels.take_missing([first, mapped, first]) == [first]
    assert parcels.take_missing([first, mapped]) == []
    assert parcels.forget("airside-t-v0", 0)
    assert not parcels.forget("airside-t-v0", 0)
    other = slab(0, OTHERS)
    assert parcels.take_missing([other]) == [other]


def test_equal_places_of_two_workers_are_two() -> None:
    parcels, here, there = Parcels(), slab(0, PIXELS), slab(0, OTHERS, "airside-t-v1")
    assert parcels.take_missing([here, there]) == [here, there]
    assert parcels.forget("airside-t-v1", 0)
    assert parcels.take_missing([here, there]) == [there]


def test_a_new_launch_has_nothing() -> None:
    parcels, one = Parcels(), slab(0, PIXELS)
    parcels.take_missing([one])
    parcels.clear()
    assert not parcels.forget("airside-t-v0", 0)
    assert parcels.take_missing([one]) == [one]


# --- the ledger ---------------------------------------------------------------------------------------------------


def sending_ledger(*names: str) -> VisionLedger:
    """With workers that send their pixels."""
    ledger = VisionLedger(CACHING)
    for name in names or ("v0",):
        ledger.join(name, f"airside-t-{name}", ARENA_BYTES, NOW, shares_memory=False)
        ledger.credit(name, 4, NOW)
    return ledger


def test_the_bytes_are_kept_as_they_came_until_nobody_needs_them() -> None:
    ledger = sending_ledger()
    add(ledger, 1, *files(1))
    (came,) = frames(PIXELS)
    effects = ledger.pixels_in("v0", pixels("v0", 1, 0, slab=128), [came], NOW)
    assert of(PixelsReady, effects)
    assert ledger.slab_of(1, 0).data is came
    assert ledger.pixels(1, 0)[0] == msg.PixelsRef("airside-t-v0", 128, 64, [])
    assert ledger.end(1, NOW) == [ParcelUnused("airside-t-v0", 128), Send("v0", msg.Release(128))]
    ledger.check()


@pytest.mark.parametrize("came", [(), (PIXELS[:-1],), (PIXELS + b"x",), (PIXELS, b""), (b"",)])
def test_a_picture_fails_whose_bytes_are_not_those_that_were_told(came: Sequence[bytes]) -> None:
    ledger = sending_ledger()
    add(ledger, 1, *files(1))
    effects = ledger.pixels_in("v0", pixels("v0", 1, 0, slab=128), frames(*came), NOW)
    assert Send("v0", msg.Release(128)) in effects
    (failed,) = of(VisionFailed, effects)
    assert failed.detail == "image 0: the vision worker sent other bytes than the pixels it speaks of"
    assert not of(PixelsReady, effects)
    ledger.check()


@pytest.mark.parametrize("came", [(PIXELS,), (b"",)])
def test_who_shares_its_memory_has_none_to_send(came: Sequence[bytes]) -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(1))
    effects = ledger.pixels_in("v0", pixels("v0", 1, 0, slab=128), frames(*came), NOW)
    assert of(VisionFailed, effects)
    assert Send("v0", msg.Release(128)) in effects


def test_what_is_kept_for_an_equal_picture_is_kept_with_its_bytes() -> None:
    ledger = sending_ledger()
    add(ledger, 1, known(1))
    ledger.pixels_in("v0", pixels("v0", 1, 0), frames(PIXELS), NOW)
    assert ledger.end(1, NOW) == []
    assert of(PixelsReady, ledger.add(2, [known(1)], NOW))
    assert ledger.slab_of(2, 0).data == PIXELS
    ledger.end(2, NOW)
    assert ledger.drain("v0") == [
        Send("v0", msg.Drain()),
        ParcelUnused("airside-t-v0", 0),
        Send("v0", msg.Release(0)),
    ]


def test_bytes_that_a_step_reads_are_kept_until_it_is_done() -> None:
    ledger = sending_ledger()
    add(ledger, 1, *files(1))
    ledger.pixels_in("v0", pixels("v0", 1, 0), frames(PIXELS), NOW)
    ledger.begin_step([1])
    assert ledger.end(1, NOW) == []
    assert ParcelUnused("airside-t-v0", 0) in ledger.close_step()


def test_the_pixels_of_a_lost_worker_go_on_being_there() -> None:
    """Nothing of it is waited for or removed, but its name is taken until they are gone."""
    ledger = sending_ledger()
    add(ledger, 1, *files(1))
    ledger.pixels_in("v0", pixels("v0", 1, 0), frames(PIXELS), NOW)
    assert not of(SegmentUnused, ledger.lose("v0", NOW))
    assert ledger.slab_of(1, 0).data == PIXELS
    assert not ledger.needs_segment_of("v0")
    assert ledger.is_taken("airside-t-v0")
    ledger.check()
    assert ledger.end(1, NOW) == [ParcelUnused("airside-t-v0", 0)]
    assert not ledger.is_taken("airside-t-v0")
    ledger.check()


def test_what_was_kept_of_a_lost_worker_is_dropped() -> None:
    ledger = sending_ledger()
    add(ledger, 1, known(1))
    ledger.pixels_in("v0", pixels("v0", 1, 0), frames(PIXELS), NOW)
    ledger.end(1, NOW)
    assert ledger.lose("v0", NOW) == [ParcelUnused("airside-t-v0", 0)]
    ledger.check()


def test_a_full_account_is_seen_to_like_a_full_arena() -> None:
    """What is idle makes room; then the picture moves to a worker that has some, whether or not that one sends."""
    ledger = sending_ledger()
    add(ledger, 1, known(1))
    ledger.pixels_in("v0", pixels("v0", 1, 0, num_bytes=400), frames(bytes(400)), NOW)
    ledger.end(1, NOW)
    add(ledger, 2, known(2))
    ledger.pixels_in("v0", pixels("v0", 2, 0, slab=448, num_bytes=500), frames(bytes(500)), NOW)
    add(ledger, 3, *files(1))
    freed = ledger.arena_full("v0", 300, NOW)
    assert freed == [ParcelUnused("airside-t-v0", 0), Send("v0", msg.Release(0))]
    ledger.join("v1", "airside-t-v1", ARENA_BYTES, NOW)
    ledger.credit("v1", 1, NOW)
    moved = ledger.arena_full("v0", 900, NOW)
    assert [(send.peer, send.message) for send in of(Send, moved)] == [
        ("v0", msg.Cancel(3, 0, 1)),
        ("v1", msg.Job(3, 0, 2)),
    ]


def test_what_was_sent_does_not_go_for_shared_memory_that_is_full() -> None:
    ledger = VisionLedger(CACHING)
    for name in ("v0", "v1"):
        ledger.join(name, f"airside-t-{name}", ARENA_BYTES, NOW, shares_memory=name == "v1")
        ledger.credit(name, 1, NOW)
    for seq_id, name, came in ((1, "v0", frames(PIXELS)), (2, "v1", [])):
        add(ledger, seq_id, known(seq_id))
        ledger.pixels_in(name, pixels(name, seq_id, 0), came, NOW)
        ledger.end(seq_id, NOW)
    ledger.credit("v1", 1, NOW)
    add(ledger, 3, known(3))  # v1's
    assert ledger.arena_full("v1", 128, NOW, is_memory_full=True) == [Send("v1", msg.Release(0))]
    assert ledger.cache_bytes == len(PIXELS)
    ledger.check()


# --- the controller on a bus --------------------------------------------------------------------------------------


class Sender(VisionWorker):
    """A vision worker that shares no memory with the ranks."""

    def hello(self, credits: int = 1, segment_bytes: int = 0) -> None:
        self.send(msg.VisionHello("there", self.pid, self.segment, segment_bytes, shares_memory=False))
        self.send(msg.Credit(credits))

    def send_pixels(self, job: msg.Job, *parts: bytes, slab: int = 0) -> msg.PixelsRef:
        ref = msg.PixelsRef(self.segment, slab, 64, [msg.TensorRef("pixel_values", "float32", [4, 4], 0)])
        self.send(msg.Pixels(job.seq_id, job.image_index, job.epoch, ref, 0.125, 0.5), *parts)
        return ref


def sender(bus: Bus, name: str = "vision-0", **hello: int) -> Sender:
    worker = bus.peer(Sender, name)
    worker.hello(**hello)
    return worker


def plan_with_images(rank: Rank) -> msg.StepPlan:
    """The first plan that reads pixels; those before it are answered."""
    while not (plan := rank.plan()).images:
        rank.answer(plan)
    return plan


def parcels_before(rank: Rank) -> list[tuple[msg.PixelsParcel, list[bytes]]]:
    """Those that came before what the rank has taken last; they are not kept."""
    envelopes = [rank.expect_envelope(msg.PixelsParcel) for _ in rank.kept(msg.PixelsParcel)]
    return [(e.message, [bytes(part) for part in e.attachments]) for e in envelopes]  # type: ignore[misc]


def parcel(ref: msg.PixelsRef, content: bytes) -> tuple[msg.PixelsParcel, list[bytes]]:
    return msg.PixelsParcel(ref.segment, ref.slab, ref.num_bytes), [content]


def test_the_ranks_get_pixels_before_the_plan_that_reads_them_and_drop_them_after_it(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus)
    gateway.add(1, (11, IMAGE_TOKEN, 12), b"picture", max_tokens=2)
    ref = vision.send_pixels(vision.job(), PIXELS, slab=4096)
    plan = plan_with_images(rank)
    assert parcels_before(rank) == [parcel(ref, PIXELS)]
    assert plan.images == [msg.ImageRow(1, 0, 0, 3, ref)]
    assert not Path("/dev/shm", vision.segment).exists()
    rank.answer(plan)
    rank.step()
    assert gateway.finish(1)[0] == [1000, 1001]
    assert rank.expect(msg.DropPixels) == msg.DropPixels(ref.segment, 4096)
    assert vision.expect(msg.Release).slab == 4096
    assert not rank.heard(msg.PixelsParcel)


def test_pixels_that_several_plans_read_are_sent_once(bus: Bus) -> None:
    gateway, rank = serving(bus, max_num_batched_tokens=4)
    vision = sender(bus, segment_bytes=4096)
    same = {"image_hashes": [b"h" * 16], "max_tokens": 1}
    gateway.add(1, (11, 12, 13, IMAGE_TOKEN, 14), b"picture", **same)
    ref = vision.send_pixels(vision.job(), PIXELS)
    rank.step_until_end(gateway, 1)
    gateway.add(2, (IMAGE_TOKEN, 15), b"picture", **same)
    rank.step_until_end(gateway, 2)
    assert parcels_before(rank) == [parcel(ref, PIXELS)]
    assert not rank.kept(msg.DropPixels)


def test_every_rank_gets_them(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2)
    gateway, ranks = bus.gateway(), [bus.peer(Rank, f"worker-{rank}") for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.hello(rank=number, world_size=2)
    gateway.wait_ready()
    vision = sender(bus)
    gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=1)
    ref = vision.send_pixels(vision.job(), PIXELS)
    plans = [plan_with_images(rank) for rank in ranks]
    assert [parcels_before(rank) for rank in ranks] == [[parcel(ref, PIXELS)]] * 2
    ranks[0].answer(plans[0])
    gateway.finish(1)
    assert [rank.expect(msg.DropPixels) for rank in ranks] == [msg.DropPixels(ref.segment, 0)] * 2


def test_a_new_launch_gets_them_again_before_its_first_plan(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus, credits=2)
    gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=2)
    ref = vision.send_pixels(vision.job(), PIXELS)
    rank.answer(plan_with_images(rank))
    lost = rank.plan()  # reads no pixels any more
    assert not lost.images
    assert len(parcels_before(rank)) == 1
    rank.send(msg.WorkerFailed(0, "gone"))
    gateway.expect(msg.EngineState, lambda state: state.state == "recovering")
    again = bus.rank("worker-again", group=1)
    plan = again.plan()
    assert plan.images
    assert parcels_before(again) == [parcel(ref, PIXELS)]
    again.answer(plan)
    assert gateway.finish(1)[0] == [1000, 1001]
    assert again.expect(msg.DropPixels) == msg.DropPixels(ref.segment, 0)


def test_pixels_of_a_request_that_ended_between_launches_are_not_sent(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus, credits=2)
    gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=5)
    vision.send_pixels(vision.job(), PIXELS)
    rank.answer(plan_with_images(rank))
    rank.send(msg.WorkerFailed(0, "gone"))
    gateway.expect(msg.EngineState, lambda state: state.state == "recovering")
    gateway.send(msg.AbortSequence(1, "cancelled"))
    gateway.finish(1)
    assert vision.expect(msg.Release).slab == 0
    again = bus.rank("worker-again", group=1)
    gateway.wait_ready()
    gateway.add(2, max_tokens=1)
    again.step()
    gateway.finish(2)
    assert not parcels_before(again)
    assert not again.kept(msg.DropPixels)


def test_of_pixels_that_no_plan_has_read_the_ranks_hear_nothing(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus, credits=2)
    gateway.add(1, (IMAGE_TOKEN, 5, IMAGE_TOKEN), b"first", b"second")
    jobs = [vision.job(), vision.job()]
    vision.send_pixels(jobs[1], PIXELS)
    gateway.expect(msg.ImageReady)
    gateway.send(msg.AbortSequence(1, "cancelled"))
    gateway.finish(1)
    assert vision.expect(msg.Release).slab == 0
    assert not rank.heard(msg.DropPixels)
    assert not rank.kept(msg.PixelsParcel)


def test_a_step_in_flight_keeps_them(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus, credits=2)
    gateway.add(1, (IMAGE_TOKEN,), b"picture")
    ref = vision.send_pixels(vision.job(), PIXELS, slab=32)
    plan = plan_with_images(rank)
    gateway.send(msg.AbortSequence(1, "cancelled"))
    gateway.finish(1)
    assert not vision.heard(msg.Release)
    assert not rank.heard(msg.DropPixels)
    rank.answer(plan)
    assert rank.expect(msg.DropPixels) == msg.DropPixels(ref.segment, 32)
    assert vision.expect(msg.Release).slab == 32


def test_other_pixels_in_the_same_place_are_sent_after_the_first_are_dropped(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus, credits=2)
    for seq_id, content in ((1, PIXELS), (2, OTHERS)):
        gateway.add(seq_id, (IMAGE_TOKEN,), b"picture", max_tokens=1)
        ref = vision.send_pixels(vision.job(), content)
        plan = plan_with_images(rank)
        assert len(rank.take(msg.DropPixels)) == seq_id - 1
        assert parcels_before(rank) == [parcel(ref, content)]
        rank.answer(plan)
        gateway.finish(seq_id)
        assert vision.expect(msg.Release).slab == 0


def test_a_lost_sender_is_missed_by_nobody(bus: Bus) -> None:
    """Its pixels are there. If it lives on it is told to go at once. Its segment's name is taken till they are gone."""
    gateway, rank = serving(bus)
    vision = sender(bus)
    gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=2)
    ref = vision.send_pixels(vision.job(), PIXELS)
    gateway.expect(msg.ImageReady)
    lose(bus, vision)
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
    vision.send(msg.Heartbeat(1))
    vision.expect(msg.Shutdown)
    vision.hello()
    assert "was used before" in vision.expect(msg.Shutdown).why
    rank.send(msg.WorkerFailed(0, "gone"))  # also a new launch can have them
    gateway.expect(msg.EngineState, lambda state: state.state == "recovering")
    again = bus.rank("worker-again", group=1)
    again.answer(plan_with_images(again))
    assert parcels_before(again) == [parcel(ref, PIXELS)]
    again.step()
    assert gateway.finish(1)[0] == [1000, 1001]
    assert again.expect(msg.DropPixels) == msg.DropPixels(ref.segment, 0)
    vision.hello()
    gateway.wait_ready(vision=True)


@pytest.mark.parametrize("came", [(), (PIXELS[1:],)])
def test_a_picture_without_its_bytes_ends_its_request_only(bus: Bus, came: Sequence[bytes]) -> None:
    gateway, rank = serving(bus)
    vision = sender(bus, credits=2)
    gateway.add(1, (IMAGE_TOKEN,), b"picture")
    vision.send_pixels(vision.job(), *came, slab=7)
    _, end = gateway.finish(1)
    assert (end.reason, end.detail) == (
        "vision_failed",
        "image 0: the vision worker sent other bytes than the pixels it speaks of",
    )
    assert vision.expect(msg.Release).slab == 7
    serves_on(gateway, rank, vision)


def serves_on(gateway: Gateway, rank: Rank, vision: Sender) -> None:
    """The next picture is fine."""
    gateway.add(9, (IMAGE_TOKEN,), b"picture", max_tokens=1)
    vision.send_pixels(vision.job(), PIXELS, slab=64)
    rank.step_until_end(gateway, 9)
    assert gateway.finish(9)[0] == [1000]
