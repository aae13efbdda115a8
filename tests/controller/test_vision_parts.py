"""The pure parts of the vision ledger, each for itself."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airside.controller.vision.arena_deadlock import deadlocked
from airside.controller.vision.forecast import Forecast
from airside.controller.vision.job_queue import JobQueue, place, turn
from airside.controller.vision.peers import PROBES_MAX, VisionPeer
from airside.controller.vision.pixel_cache import PixelCache, Slab
from airside.controller.vision.pixel_jobs import Image, JobState, KnownShape, PixelJob
from airside.proto.messages import PixelsRef

NAMES = itertools.count()


def job(pixels: int | None = None, due: float = 0.0, url: str = "") -> PixelJob:
    image = Image((next(NAMES), 0), 0.0, b"")
    made = PixelJob.of(image, url, memoryview(b"file"), "")
    if pixels is not None:
        made.shape, made.due = KnownShape(b"", pixels), due
    return made


def ref(slab: int, num_bytes: int = 10, segment: str = "s") -> PixelsRef:
    return PixelsRef(segment, slab, num_bytes, [])


SHAPE = KnownShape(b"", 1)


# --- the forecast -----------------------------------------------------------------------------------------------------


def test_before_anything_was_measured_a_forecast_is_sane() -> None:
    forecast = Forecast()
    assert 0.001 < forecast.seconds(100) < 0.05
    assert 0.1 < forecast.seconds(12_000_000) < 2
    assert forecast.pixels_usual == 1e6


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_a_forecast_learns_nothing_from_what_is_no_time(seconds: float) -> None:
    forecast = Forecast()
    forecast.note(100, seconds)
    assert forecast.seconds(100) == Forecast().seconds(100)


def test_a_forecast_learns_overhead_and_rate() -> None:
    forecast = Forecast()
    for pixels in [50_000, 3_000_000, 12_000_000] * 30:
        forecast.note(pixels, 0.02 + pixels * 2e-7)
    assert forecast.seconds(0) == pytest.approx(0.02, abs=0.02)
    assert forecast.seconds(10_000_000) == pytest.approx(2.02, rel=0.1)


def test_small_pictures_say_little_about_large_ones() -> None:
    """Mostly overhead: as a rate alone it would make seconds of 12 megapixels, and minutes of 64."""
    forecast = Forecast()
    for _ in range(100):
        forecast.note(2_500, 0.02)
    assert forecast.seconds(2_500) == pytest.approx(0.02, rel=0.2)
    assert forecast.seconds(12_000_000) < 2


def test_a_forecast_forgets() -> None:
    forecast = Forecast()
    for seconds in [1.0] * 100 + [0.1] * 100:
        forecast.note(1_000_000, seconds)
    assert forecast.seconds(1_000_000) == pytest.approx(0.1, rel=0.2)


@given(st.lists(st.tuples(st.integers(1, 2**26), st.floats(-1, 100)), max_size=50), st.integers(1, 2**26))
def test_a_forecast_is_never_negative_and_grows_with_the_picture(
    measured: list[tuple[int, float]], pixels: int
) -> None:
    forecast = Forecast()
    for of_pixels, seconds in measured:
        forecast.note(of_pixels, seconds)
    assert 0 <= forecast.seconds(pixels) <= forecast.seconds(2 * pixels)


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_queue_is_in_the_order_of_turns() -> None:
    queue, jobs = JobQueue(), [job(1, due) for due in (3.0, 1.0, 2.0, 1.0)]
    for each in jobs:
        queue.add(each)
    assert list(queue) == [jobs[1], jobs[3], jobs[2], jobs[0]]
    queue.remove(jobs[3])
    assert list(queue) == [jobs[1], jobs[2], jobs[0]]
    assert jobs[3] not in queue
    assert (jobs[2] in queue, len(queue)) == (True, 3)


def test_a_large_one_is_passed_for_a_bounded_time() -> None:
    assert turn(10.0, 2.0) > turn(12.0, 0.01)
    assert turn(10.0, 2.0) < turn(19.0, 0.01)


def test_whoever_wants_a_worker_to_itself_gets_one_in_time() -> None:
    """Nobody may take the large one: the worker with less to do is kept free for it, the other one goes on."""
    load = {"a": 2, "b": 1}
    large, small = job(100), job(1)
    pairs = place([large, small], ["a", "b"], lambda _, it: it is small, lambda name: (load[name],))
    assert list(pairs) == [(small, "a")]
    assert list(place([large, large, small], ["a", "b"], lambda _, it: it is small, lambda _: (0,))) == []


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_takes_what_it_has_credit_and_a_window_for() -> None:
    peer = VisionPeer("v", "s", 0)
    assert not peer.may_take(job(1))
    peer.credits = 3
    peer.give(job(600_000), 1.0)
    assert peer.may_take(job(400_000))
    assert not peer.may_take(job(400_001))
    peer.room_wanted = 1
    assert not peer.may_take(job(1))


def test_probes_of_one_worker_are_bounded() -> None:
    peer = VisionPeer("v", "s", 0)
    for _ in range(PROBES_MAX):
        each = job()
        assert peer.may_probe(each)
        peer.probes[each.key] = each
    assert not peer.may_probe(job())
    assert peer.may_fetch()


def suspect(pixels: int | None = None) -> PixelJob:
    made = job(pixels)
    made.witnessed = 1
    return made


def test_a_suspect_is_alone_with_its_worker() -> None:
    for tried in (suspect(1), suspect()):
        beside = VisionPeer("v", "s", 0, credits=4)
        ask = beside.may_take if tried.shape else beside.may_probe
        assert ask(tried)
        header = job()
        beside.probes[header.key] = header
        assert not ask(tried)  # nothing that might be to blame as well
        del beside.probes[header.key]
        beside.give(job(1), 0.0)
        assert not ask(tried)
        beside.cancel(next(iter(beside.jobs.values())))
        assert not ask(tried)  # it may be at that one still
        beside.credit(1, 0.0)
        assert ask(tried)


def test_nothing_is_given_to_a_worker_that_has_a_suspect() -> None:
    making, reading = (VisionPeer("v", "s", 0, credits=4) for _ in range(2))
    making.give(suspect(1), 0.0)
    header = suspect()
    reading.probes[header.key] = header
    for peer in (making, reading):
        assert not peer.may_take(job(1))
        assert not peer.may_probe(job())


def test_a_job_is_not_blamed_for_the_time_of_one_that_was_cancelled_before_it() -> None:
    peer = VisionPeer("v", "s", 0, credits=4)
    dropped, later = job(1), job(1)
    peer.give(dropped, 0.0)
    peer.give(later, 0.0)
    assert peer.suspects(5.0, 1.0, 1.0) == [dropped]
    peer.cancel(dropped)
    assert peer.is_stuck(5.0, 1.0, 1.0)
    assert peer.suspects(5.0, 1.0, 1.0) == []


def test_with_a_job_and_a_header_in_hand_nobody_knows_who_did_it() -> None:
    peer = VisionPeer("v", "s", 0, credits=4)
    header, made = job(), job(1)
    peer.probes[header.key] = header
    assert peer.suspects(0.0, 1.0, 1.0) == [header]
    peer.give(made, 0.0)
    assert peer.suspects(0.0, 1.0, 1.0) == []
    del peer.probes[header.key]
    assert peer.suspects(0.0, 1.0, 1.0) == [made]
    assert peer.suspects(5.0, 1.0, 1.0) == [made]


def test_a_header_that_nobody_wants_any_more_may_still_be_to_blame() -> None:
    peer = VisionPeer("v", "s", 0)
    unwanted, other = job(), job()
    peer.probes |= {unwanted.key: unwanted, other.key: other}
    unwanted.become(JobState.OVER)
    assert peer.suspects(0.0, 1.0, 1.0) == []
    assert peer.held() == [other]


# --- slabs ------------------------------------------------------------------------------------------------------------


def cache_of(bytes_max: int, segment_bytes: int = 1000) -> PixelCache:
    cache = PixelCache(bytes_max)
    cache.open("s", segment_bytes)
    return cache


def used(cache: PixelCache, slab: int, content: bytes, num_bytes: int = 10, segment: str = "s") -> Slab:
    taken = cache.take(ref(slab, num_bytes, segment), SHAPE, content)
    cache.use(taken)
    cache.check()
    return taken


def test_a_slab_is_kept_after_its_last_user_and_found_again() -> None:
    cache = cache_of(100)
    slab = used(cache, 1, b"a")
    cache.use(slab)
    assert cache.drop(slab, may_keep=True) == []
    assert cache.idle_bytes == 0  # one user is left
    assert cache.drop(slab, may_keep=True) == []
    assert (cache.idle_bytes, cache.find(b"a")) == (10, slab)
    cache.use(slab)
    assert cache.idle_bytes == 0
    assert cache.drop(slab, may_keep=False) == [slab]
    assert (cache.find(b"a"), cache.is_leased("s")) == (None, False)
    cache.check()


def test_without_a_content_nothing_is_kept() -> None:
    cache = cache_of(100)
    slab = used(cache, 1, b"")
    assert cache.drop(slab, may_keep=True) == [slab]


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of(30)
    slabs = [used(cache, number, b"%d" % number) for number in range(4)]
    for slab in slabs[:3]:
        assert cache.drop(slab, may_keep=True) == []
    cache.use(slabs[0])
    cache.drop(slabs[0], may_keep=True)
    assert cache.drop(slabs[3], may_keep=True) == [slabs[1]]
    assert cache.make_room("s", 15) == [slabs[2], slabs[0]]
    cache.check()


def test_idle_slabs_leave_half_of_each_segment_to_its_worker() -> None:
    cache = cache_of(1000, segment_bytes=50)
    cache.open("t", 1000)
    slabs = [used(cache, number, b"%d" % number) for number in range(3)]
    other = used(cache, 1, b"t", segment="t")
    freed = [cache.drop(slab, may_keep=True) for slab in (other, *slabs)]
    assert freed == [[], [], [], [slabs[0]]]
    cache.check()


def test_one_that_is_larger_than_the_cache_is_not_kept() -> None:
    cache = cache_of(30)
    small, large = used(cache, 1, b"a"), used(cache, 2, b"b", num_bytes=31)
    cache.drop(small, may_keep=True)
    assert cache.drop(large, may_keep=True) == [small, large]


def test_a_closed_segment_keeps_nothing_and_shares_nothing() -> None:
    cache = cache_of(100)
    idle, busy = used(cache, 1, b"a"), used(cache, 2, b"b")
    cache.drop(idle, may_keep=True)
    assert cache.close("s") == [idle]
    assert cache.find(b"b") is None
    late = used(cache, 3, b"b")
    assert cache.find(b"b") is None
    assert cache.drop(busy, may_keep=True) == [busy]
    assert cache.drop(late, may_keep=True) == [late]
    cache.check()


# --- deadlocks over room ----------------------------------------------------------------------------------------------


def full_worker(name: str) -> VisionPeer:
    return VisionPeer(name, f"segment-{name}", 1000, room_wanted=10)


def made_on(worker: VisionPeer) -> Image:
    image = Image((next(NAMES), 0), 0.0, b"")
    image.slab = Slab(ref(0, segment=worker.segment), SHAPE, b"")
    return image


def waiting(state: JobState, worker: VisionPeer | None = None) -> Image:
    image = Image((next(NAMES), 0), 0.0, b"")
    image.job = PixelJob.of(image, "", memoryview(b"file"), "")
    image.job.state, image.job.worker = state, None if worker is None else worker.name
    return image


def test_workers_that_wait_for_one_another_wait_in_vain() -> None:
    first, second = full_worker("a"), full_worker("b")
    sequences = [
        [made_on(first), waiting(JobState.PROCESSING, second)],
        [made_on(second), waiting(JobState.PROCESSING, first)],
    ]
    assert deadlocked([first, second], sequences, []) == [first, second]
    assert deadlocked([first, second], sequences, [second.segment]) == []
    assert deadlocked([first, second], [*sequences, [made_on(first)]], []) == []  # the last one is about to end
    assert deadlocked([first, second], [*sequences, [made_on(first), Image((0, 0), 0.0, b"")]], []) == []  # it failed
    second.was_helped = True
    assert deadlocked([first, second], sequences, []) == []


@pytest.mark.parametrize(
    ("state", "is_alone", "in_vain"),
    [
        (JobState.QUEUED, True, True),
        (JobState.QUEUED, False, False),
        (JobState.UNKNOWN, True, True),
        (JobState.PROBING, True, False),
    ],
)
def test_a_picture_in_nobody_s_hand_is_made_by_whoever_goes_on(state: JobState, is_alone: bool, in_vain: bool) -> None:
    full, free = full_worker("a"), VisionPeer("b", "segment-b", 1000)
    image = waiting(state, full if state is JobState.PROBING else None)
    peers = [full] if is_alone else [full, free]
    assert deadlocked(peers, [[made_on(full), image]], []) == [full] * in_vain
    full.drain()
    assert deadlocked([full], [[made_on(full), image]], []) == []  # another worker is about to come


def test_a_deadlock_among_some_is_found_while_others_work() -> None:
    full, free = full_worker("a"), VisionPeer("b", "segment-b", 1000)
    images = [made_on(full), waiting(JobState.PROCESSING, full), waiting(JobState.PROCESSING, free)]
    assert deadlocked([full, free], [images], []) == [full]
    assert deadlocked([full, free], [images[:1] + images[2:]], []) == []
