"""How many vision workers the load asks for; no process is started here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airside.cluster.config.schema import AutoscalingBlock
from airside.cluster.supervisor.autoscaler import LOAD_EXPIRES_S, Autoscaler, Bounds
from airside.proto.messages import VisionLoad

EVERY_S = 0.5
SERVICE_S = 0.02
CHANGES_MAX = 4  # in ten minutes of random arrivals; a number that follows them changes each half minute
IDLE = VisionLoad(queued=0, in_hand=0, workers=1, wait_s=0.0)


def load(work_s: float, workers: int, queued: int = 20, in_hand: int = 0, done: int = 0) -> VisionLoad:
    """So much work before these workers."""
    return VisionLoad(queued, in_hand, workers, work_s / max(1, workers), done)


class Stage:
    """An autoscaler that is told a load every half second: 50 ms of wait, up after 3 s, down after 60 s."""

    def __init__(self, fewest: int = 1, most: int = 4, **rules: float) -> None:
        self.rules = AutoscalingBlock(**({"min_replicas": fewest, "max_replicas": max(1, most)} | rules))
        self.scaler = Autoscaler(self.rules, Bounds(fewest, most))
        self.now = 100.0

    def hear(self, load: VisionLoad) -> int:
        self.scaler.hear(load, self.now)
        self.now += EVERY_S
        return self.scaler.wanted

    def hear_for(self, duration_s: float, load: VisionLoad) -> list[int]:
        return [self.hear(load) for _ in range(round(duration_s / EVERY_S))]

    def grow(self, replicas: int) -> None:
        """By load, to so many, that are there and have nothing to do any more."""
        self.hear_for(3.5, load(10.0, self.scaler.wanted, queued=replicas))
        assert self.scaler.wanted == replicas


def test_it_begins_with_the_fewest() -> None:
    assert Stage(fewest=2).scaler.wanted == 2
    assert Stage(fewest=0).scaler.wanted == 0


def test_up_once_the_wait_has_been_too_long_for_the_delay() -> None:
    stage = Stage()
    assert stage.hear_for(3.0, load(0.15, workers=1)) == [1] * 6
    assert stage.hear(load(0.15, workers=1)) == 3  # in 50 ms each does a third of it


@pytest.mark.parametrize(
    ("work_s", "wanted"), [(0.0, 1), (0.049, 1), (0.05, 1), (0.051, 2), (0.1, 2), (0.15, 3), (0.151, 4), (1e9, 4)]
)
def test_as_many_as_bring_the_wait_under_the_target(work_s: float, wanted: int) -> None:
    stage = Stage()
    stage.hear_for(4, load(work_s, workers=1))
    assert stage.scaler.wanted == wanted


def test_the_work_counts_and_not_what_the_present_workers_make_of_it() -> None:
    stage = Stage(most=8)
    stage.grow(2)
    stage.hear_for(4, load(0.3, workers=2))  # a wait of 150 ms for two
    assert stage.scaler.wanted == 6


def test_a_wait_that_passes_starts_nothing() -> None:
    stage = Stage()
    for _ in range(20):
        assert set(stage.hear_for(3.0, load(5.0, workers=1))) == {1}
        assert stage.hear(IDLE) == 1


def test_of_a_changing_need_what_lasted() -> None:
    stage = Stage()
    for work_s in (0.2, 0.1, 0.2, 0.2, 0.1, 0.2, 0.2):
        stage.hear(load(work_s, workers=1))
    assert stage.scaler.wanted == 2


def test_no_more_than_there_are_pictures() -> None:
    stage = Stage()
    stage.hear_for(10, load(9.0, workers=1, queued=1, in_hand=1))
    assert stage.scaler.wanted == 2


def test_while_some_are_starting_no_more_are_asked_for() -> None:
    stage = Stage()
    stage.hear_for(4, load(0.1, workers=1))
    assert set(stage.hear_for(30, load(20.0, workers=1))) == {2}
    stage.hear_for(4, load(20.0, workers=2))
    assert stage.scaler.wanted == 4


def test_down_once_fewer_would_have_done_for_the_delay() -> None:
    stage = Stage()
    stage.grow(3)
    wanted = stage.hear_for(70, load(0.0, workers=3, queued=0))
    at = wanted.index(1)
    assert wanted == [3] * at + [1] * (len(wanted) - at)
    assert 59.5 <= at * EVERY_S <= 60.5


def test_down_to_what_was_needed_meanwhile() -> None:
    stage = Stage()
    stage.grow(4)
    stage.hear_for(30, load(0.0, workers=4, queued=0))
    stage.hear_for(10, load(0.15, workers=4))
    stage.hear_for(30, load(0.0, workers=4, queued=0))
    assert stage.scaler.wanted == 3
    stage.hear_for(40, load(0.0, workers=3, queued=0))
    assert stage.scaler.wanted == 1


def test_workers_that_are_busy_all_the_time_stay() -> None:
    stage = Stage()
    stage.grow(3)
    busy = VisionLoad(queued=0, in_hand=2, workers=3, wait_s=0.001)  # two of three, and nobody waits
    assert set(stage.hear_for(600, busy)) == {3}
    half_busy = VisionLoad(queued=0, in_hand=1, workers=3, wait_s=0.001)
    stage.hear_for(130, half_busy)
    assert stage.scaler.wanted == 2


def test_from_zero_at_once_when_something_waits() -> None:
    stage = Stage(fewest=0)
    assert set(stage.hear_for(30, load(0.0, workers=0, queued=0))) == {0}
    assert stage.hear(load(0.0, workers=0, queued=1)) == 1  # also when nobody knows its size
    assert set(stage.hear_for(30, load(50.0, workers=0, queued=80))) == {1}  # it is starting
    stage.hear_for(4, load(50.0, workers=1, queued=80))
    assert stage.scaler.wanted == 4


def test_from_zero_with_the_very_first_load() -> None:
    assert Stage(fewest=0).hear(load(0.1, workers=0, queued=1)) == 1


def test_to_zero_once_there_was_nothing_to_do_for_the_delay() -> None:
    stage = Stage(fewest=0)
    stage.hear(load(0.1, workers=0, queued=1))
    for _ in range(20):  # pictures that came and went between two loads are pictures
        assert set(stage.hear_for(40, load(0.0, workers=1, queued=0))) == {1}
        assert stage.hear(load(0.0, workers=1, queued=0, done=1)) == 1
    wanted = stage.hear_for(70, load(0.0, workers=1, queued=0))
    assert 59.5 <= wanted.index(0) * EVERY_S <= 60.5


def test_delays_of_zero_act_on_the_load_as_it_is() -> None:
    stage = Stage(fewest=0, upscale_delay_s=0, downscale_delay_s=0)
    assert stage.hear(load(0.1, workers=0, queued=3)) == 2
    assert stage.hear(load(0.15, workers=2, queued=3)) == 3
    assert stage.hear(load(0.0, workers=3, queued=0)) == 0


def test_an_exact_number_overrides_the_load_and_a_range_gives_way_to_it() -> None:
    stage = Stage()
    stage.scaler.ask(Bounds(2, 2))
    assert stage.scaler.wanted == 2
    assert set(stage.hear_for(100, load(90.0, workers=2))) == {2}
    assert set(stage.hear_for(100, load(0.0, workers=2, queued=0))) == {2}
    stage.scaler.ask(Bounds(1, 3))
    assert stage.scaler.bounds == Bounds(1, 3)
    assert set(stage.hear_for(60, load(0.0, workers=2, queued=0))) == {2}  # from now on the load decides
    stage.hear_for(1, load(0.0, workers=2, queued=0))
    assert stage.scaler.wanted == 1
    stage.hear_for(4, load(90.0, workers=1))
    assert stage.scaler.wanted == 3


@pytest.mark.parametrize(("bounds", "wanted"), [((0, 0), 0), ((3, 4), 3), ((0, 1), 1), ((0, 4), 2)])
def test_a_range_takes_the_nearest_number_at_once(bounds: tuple[int, int], wanted: int) -> None:
    stage = Stage()
    stage.grow(2)
    stage.scaler.ask(Bounds(*bounds))
    assert stage.scaler.wanted == wanted


def test_none_are_started_where_none_are_allowed() -> None:
    stage = Stage(fewest=0, most=0)
    assert set(stage.hear_for(30, load(9.0, workers=0))) == {0}


@pytest.mark.parametrize("how", ["a pause", "a new controller"])
def test_old_loads_count_for_nothing(how: str) -> None:
    stage = Stage()

    def pass_over() -> None:
        if how == "a pause":
            stage.now += LOAD_EXPIRES_S
        else:
            stage.scaler.restart()

    stage.hear_for(3.0, load(9.0, workers=1))
    pass_over()
    assert set(stage.hear_for(3.0, load(9.0, workers=1))) == {1}
    assert stage.hear(load(9.0, workers=1)) == 4
    stage.hear_for(59, load(0.0, workers=4, queued=0))
    pass_over()
    assert stage.scaler.wanted == 4  # the number stays
    assert set(stage.hear_for(60, load(0.0, workers=4, queued=0))) == {4}
    assert stage.hear(load(0.0, workers=4, queued=0)) == 1


# --- whatever the load ------------------------------------------------------------------------------------------------

LOADS = st.builds(
    VisionLoad,
    queued=st.integers(0, 50),
    in_hand=st.integers(0, 8),
    workers=st.integers(0, 8),
    wait_s=st.floats(0, 1e6),
    done=st.integers(0, 3),
)
BOUNDS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: Bounds(min(pair), max(pair)))
DELAYS = st.sampled_from([0.0, 0.4, 1.0, 3.0, 7.5])
GAPS = st.sampled_from([0.0, 0.1, 0.5, 0.5, 1.0, LOAD_EXPIRES_S + 0.1])


@given(BOUNDS, DELAYS, DELAYS, st.lists(st.tuples(GAPS, st.one_of(LOADS, BOUNDS)), max_size=60))
def test_always_within_the_bounds_and_never_up_without_a_need_that_lasted(
    bounds: Bounds, up_s: float, down_s: float, events: list[tuple[float, VisionLoad | Bounds]]
) -> None:
    rules = AutoscalingBlock(upscale_delay_s=up_s, downscale_delay_s=down_s)
    scaler = Autoscaler(rules, bounds)
    now, enough_at = 0.0, 0.0  # when so many as are wanted were last enough, or nothing was known
    for gap_s, event in events:
        now += gap_s
        before = scaler.wanted
        if isinstance(event, Bounds):
            bounds, enough_at = event, now
            scaler.ask(event)
        else:
            too_slow = event.wait_s * max(1, event.workers) * 1000 > before * rules.target_media_wait_ms
            too_many = event.queued + event.in_hand > before
            if not (too_slow and too_many and event.workers >= before and gap_s <= LOAD_EXPIRES_S):
                enough_at = now
            scaler.hear(event, now)
            if scaler.wanted > before and (before, scaler.wanted) != (0, 1):
                assert now - enough_at >= up_s
            if scaler.wanted != before:
                enough_at = now
        assert bounds.fewest <= scaler.wanted <= bounds.most


@given(BOUNDS, DELAYS, DELAYS, st.integers(0, 6), LOADS)
def test_a_constant_load_moves_it_to_its_place_and_there_it_stays(
    bounds: Bounds, up_s: float, down_s: float, first: int, constant: VisionLoad
) -> None:
    """From any number, with all workers that are wanted there: at most one step up, or down in ever smaller steps."""
    stage = Stage(0, 6, upscale_delay_s=up_s, downscale_delay_s=down_s)
    stage.scaler.ask(Bounds(first, first))
    stage.scaler.ask(bounds)
    wanted = [stage.scaler.wanted]
    work_s = constant.wait_s * max(1, constant.workers)
    for _ in range(200):
        there = load(work_s, wanted[-1], constant.queued, constant.in_hand, constant.done)
        wanted.append(stage.hear(there))
    moves = [after - before for before, after in pairwise(wanted) if after != before]
    assert all(move < 0 for move in moves) or (all(move > 0 for move in moves) and len(moves) <= 2)
    assert len(set(wanted[-100:])) == 1
    needed = min(-(-work_s * 1000 // 50), constant.queued + constant.in_hand)
    assert wanted[-1] >= bounds.clamp(int(needed))


class Shop:
    """Vision workers, a queue before them, and pictures that come at random at a constant rate."""

    def __init__(self, seed: int, per_s: float, service_s: float) -> None:
        self.random = Random(seed)
        self.per_s, self.service_s = per_s, service_s
        self.queue: deque[float] = deque()
        self.free_at: list[float] = []  # of each worker that is up
        self.starting: list[float] = []  # when each of these will be
        self.next_at = self.random.expovariate(per_s)

    def loads(self, wanted: Callable[[], int], until_s: float) -> Iterator[tuple[float, VisionLoad]]:
        """One each half second, with its time; `wanted` workers there should be. They need 2 s to start."""
        now = 0.0
        while now < until_s:
            now += EVERY_S
            size = wanted()
            while len(self.free_at) + len(self.starting) < size:
                self.starting.append(now + 2.0)
            self.starting = self.starting[: max(0, size - len(self.free_at))]
            self.free_at = sorted(self.free_at)[:size]
            self.free_at += [at for at in self.starting if at <= now]
            self.starting = [at for at in self.starting if at > now]
            self._work(now)
            in_hand = sum(at > now for at in self.free_at)
            left_s = sum(max(0.0, at - now) for at in self.free_at) + self.service_s * len(self.queue)
            yield now, VisionLoad(len(self.queue), in_hand, len(self.free_at), left_s / max(1, len(self.free_at)), 1)

    def _work(self, now: float) -> None:
        while self.next_at <= now:
            self.queue.append(self.next_at)
            self.next_at += self.random.expovariate(self.per_s)
        while self.queue and self.free_at and min(self.free_at) <= now:
            first = min(range(len(self.free_at)), key=self.free_at.__getitem__)
            begin = max(self.free_at[first], self.queue.popleft())
            self.free_at[first] = begin + self.service_s


@pytest.mark.parametrize("busy", [0.1, 0.6, 1.2, 1.7, 2.9, 3.4])
def test_a_steady_stream_of_pictures_makes_it_settle(busy: float) -> None:
    """`busy` workers' worth of pictures: they end up with enough, and the number rests."""
    scaler = Autoscaler(AutoscalingBlock(downscale_delay_s=30), Bounds(1, 6))
    shop = Shop(round(10 * busy), busy / SERVICE_S, SERVICE_S)
    wanted: list[int] = []
    for now, heard in shop.loads(lambda: scaler.wanted, until_s=900.0):
        scaler.hear(heard, now)
        wanted.append(scaler.wanted)
    settled = wanted[len(wanted) // 3 :]
    assert sum(a != b for a, b in pairwise(settled)) <= CHANGES_MAX
    assert min(settled) > busy
    assert len(shop.queue) * SERVICE_S < 1.0
