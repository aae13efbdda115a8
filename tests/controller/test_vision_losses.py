"""The vision ledger when workers are lost, hang, or have no room, and when messages are stale."""

from __future__ import annotations

import tempfile
from typing import cast

import pytest

from airside.controller.engine_host import EngineHost
from airside.controller.front_desk import FrontDesk
from airside.controller.post import Post
from airside.controller.vision.desk import VisionDesk
from airside.controller.vision.dispatch import WITNESSED_MAX, VisionLimits
from airside.controller.vision.effects import PixelsReady, SegmentUnused, Send, VisionFailed
from airside.controller.vision.ledger import ImageFile, VisionLedger
from airside.proto.channel import Hub
from airside.proto.messages import (
    Cancel,
    Drain,
    Fetched,
    ImageFailed,
    Job,
    Pixels,
    PixelsRef,
    Release,
)
from tests.controller.ledger_script import (
    ARENA_BYTES,
    LARGE,
    NOW,
    add,
    done,
    files,
    jobs,
    known,
    ledger_with,
    of,
    pixels,
    probes,
    sent,
    shape,
)

# --- what is lost -----------------------------------------------------------------------------------------------------


def test_a_lost_worker_costs_a_second_try_elsewhere_and_only_the_oldest_job_is_blamed() -> None:
    ledger = ledger_with(("v0", 4), ("v1", 0), limits=VisionLimits(attempts_max=1))
    add(ledger, 1, *files(3))
    effects = ledger.lose("v0", NOW)
    assert of(VisionFailed, effects) == [VisionFailed(1, "image 0: vision worker lost: one died on it", "worker_lost")]
    assert SegmentUnused("airside-t-v0") in effects
    assert jobs(ledger.credit("v1", 4, NOW)) == [("v1", (1, 1, 2))]


def test_an_image_that_lost_a_worker_is_tried_alone() -> None:
    ledger = ledger_with(("v0", 2), ("v1", 4))
    add(ledger, 1, *files(1))
    add(ledger, 2, *files(1))
    add(ledger, 3, *files(1))  # v0 and v1 have one job each, and then v0 a second
    assert jobs(ledger.lose("v0", NOW)) == []  # v1 still has sequence 2's image in hand
    assert jobs(done(ledger, "v1", 2, 0, 1)) == [("v1", (1, 0, 2))]
    assert probes(ledger.add(4, files(1), NOW)) == []  # not even asked for a header beside it
    assert jobs(done(ledger, "v1", 1, 0, 2, slab=64)) == [("v1", (3, 0, 2))]


def test_an_image_that_killed_three_workers_fails() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1), ("v2", 1), ("v3", 1))
    add(ledger, 1, *files(1))
    assert jobs(ledger.lose("v0", NOW)) == [("v1", (1, 0, 2))]
    assert jobs(ledger.lose("v1", NOW)) == [("v2", (1, 0, 3))]
    effects = ledger.lose("v2", NOW)
    assert jobs(effects) == []
    assert of(VisionFailed, effects) == [
        VisionFailed(1, "image 0: vision worker lost: three died on it", "worker_lost")
    ]


def test_what_a_lost_worker_did_not_take_is_not_to_blame() -> None:
    """One that was gone already gets pictures until a first one does not reach it."""
    ledger = ledger_with(("v0", 2), ("v1", 2), limits=VisionLimits(attempts_max=1))
    add(ledger, 1, *files(4))  # two jobs for each
    for index in (1, 3):
        ledger.undelivered("v1", Job(1, index, 1))
    effects = ledger.lose("v1", NOW)
    assert of(VisionFailed, effects) == []
    assert probes(ledger.add(2, files(1), NOW)) == [("v0", (2, 0, 1))]  # nobody is suspected, and kept apart
    ledger.undelivered("v0", Job(1, 2, 1))
    effects = ledger.lose("v0", NOW)
    assert of(VisionFailed, effects) == []  # it may have been sequence 2's header as well
    ledger.check()


def test_what_a_lost_worker_was_not_looking_into_is_not_to_blame() -> None:
    """One that was stopped takes whatever it is given, and looks into nothing."""
    one_attempt = VisionLimits(attempts_max=1, job_s=20)
    ledger = ledger_with(("v0", 2), ("v1", 0), limits=one_attempt)
    add(ledger, 1, *files(2))
    assert ledger.add(2, files(1), NOW)  # a header to look into
    assert of(VisionFailed, ledger.lose("v0", NOW + 21, at_work=())) == []
    assert probes(ledger.add(3, files(1), NOW)) == [("v1", (3, 0, 1))]  # nobody is suspected, and kept apart
    ledger.check()


def test_what_a_lost_worker_was_looking_into_is_to_blame() -> None:
    ledger = ledger_with(("v0", 2), limits=VisionLimits(attempts_max=1))
    add(ledger, 1, *files(2))
    effects = ledger.lose("v0", NOW, at_work=[(1, 1, 1), (7, 0, 1)])
    assert of(VisionFailed, effects) == [VisionFailed(1, "image 1: vision worker lost: one died on it", "worker_lost")]
    ledger.check()


@pytest.mark.parametrize("is_known", [False, True])
def test_pictures_for_workers_that_are_gone_are_not_lost_with_them(is_known: bool) -> None:
    ledger = VisionLedger(VisionLimits(attempts_max=1))
    with tempfile.TemporaryDirectory(prefix="vtest-") as folder, Hub(f"ipc://{folder}/bus") as hub:
        desk = VisionDesk(ledger, cast(EngineHost, None), cast(FrontDesk, None), Post(hub), 0)
        for number in range(20):
            desk.perform(ledger.join(f"v{number}", f"airside-t-v{number}", ARENA_BYTES, NOW))  # nobody is on the bus
            desk.perform(ledger.credit(f"v{number}", 4, NOW))
        effects = ledger.add(1, files(1), NOW)
        if is_known:
            [(worker, key)] = probes(effects)
            effects = [effect for effect in ledger.shape(worker, shape(*key), NOW) if isinstance(effect, Send)]
        desk.perform(effects)
        for number in range(20):
            lost = ledger.lose(f"v{number}", NOW)
            assert not of(VisionFailed, lost)
            desk.perform([effect for effect in lost if isinstance(effect, Send)])
    ledger.check()
    assert ledger.num_queued == 1


def test_a_header_that_kills_three_workers_fails() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1), ("v2", 1), ("v3", 1))
    assert probes(ledger.add(1, files(1), NOW)) == [("v0", (1, 0, 1))]
    assert probes(ledger.lose("v0", NOW)) == [("v1", (1, 0, 2))]
    assert probes(ledger.lose("v1", NOW)) == [("v2", (1, 0, 3))]
    failures = of(VisionFailed, ledger.lose("v2", NOW))
    assert failures == [VisionFailed(1, "image 0: vision worker lost: three died on it", "worker_lost")]


def test_nobody_is_blamed_when_it_may_have_been_a_job_that_was_cancelled() -> None:
    ledger = ledger_with(("v0", 2), ("v1", 1), limits=VisionLimits(attempts_max=1))
    add(ledger, 9, *files(1))  # keeps v0's other neighbour busy
    add(ledger, 1, *files(1))
    ledger.end(9, NOW)
    add(ledger, 2, *files(1))
    effects = ledger.lose("v0", NOW)
    assert of(VisionFailed, effects) == []


def test_nobody_is_blamed_when_it_may_have_been_a_header_that_was_only_counted() -> None:
    ledger = ledger_with(("v0", 2), limits=VisionLimits(attempts_max=1))
    add(ledger, 1, *files(1))
    assert of(VisionFailed, ledger.lose("v0", NOW, was_counting=True)) == []
    ledger = ledger_with(("v0", 2), limits=VisionLimits(attempts_max=1))
    add(ledger, 1, *files(1))
    assert of(VisionFailed, ledger.lose("v0", NOW, at_work=[(1, 0, 1)], was_counting=True)), "its marks tell"


def test_a_fetch_is_never_blamed() -> None:
    ledger = ledger_with(("v0", 1), limits=VisionLimits(attempts_max=1))
    ledger.add(1, [ImageFile(memoryview(b""), "http://t/7")], NOW)
    for number in range(1, 2 + WITNESSED_MAX):
        name = f"v{number}"
        effects = ledger.lose(f"v{number - 1}", NOW) + ledger.join(name, f"airside-t-{name}", ARENA_BYTES, NOW)
        assert probes(effects) == [(name, (1, 0, 1 + number))]


def test_stale_messages_are_harmless_and_a_stale_slab_goes_straight_back() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1), ("v2", 1))
    add(ledger, 1, *files(1))
    assert jobs(ledger.lose("v0", NOW)) == [("v1", (1, 0, 2))]
    assert ledger.shape("v0", shape(1, 0, 1), NOW) == []
    assert ledger.shape("v1", shape(1, 0, 2), NOW) == []
    for worker, epoch in (("v0", 1), ("v1", 1), ("v2", 2)):
        assert ledger.image_failed(worker, ImageFailed(1, 0, epoch, "truncated", "it ends early"), NOW) == []
    assert ledger.pixels_in("v1", pixels("v1", 1, 0, 1, slab=32), [], NOW) == [Send("v1", Release(32))]
    assert ledger.pixels_in("v2", pixels("v2", 1, 0, 2, slab=32), [], NOW) == [Send("v2", Release(32))]
    assert of(PixelsReady, ledger.pixels_in("v1", pixels("v1", 1, 0, 2), [], NOW))
    ledger.check()


def test_a_message_that_comes_twice_gives_no_slab_back_twice() -> None:
    ledger = ledger_with(("v0", 2), limits=VisionLimits())
    add(ledger, 1, *files(1))
    twice = pixels("v0", 1, 0, slab=64)
    assert of(PixelsReady, ledger.pixels_in("v0", twice, [], NOW))
    assert ledger.pixels_in("v0", twice, [], NOW) == []
    assert ledger.end(1, NOW) == [Send("v0", Release(64))]
    assert ledger.pixels_in("v0", twice, [], NOW) == []
    add(ledger, 2, *files(1))
    ledger.end(2, NOW)
    late = pixels("v0", 2, 0, slab=128)
    assert ledger.pixels_in("v0", late, [], NOW) == [Send("v0", Release(128))]
    assert ledger.pixels_in("v0", late, [], NOW) == []


def test_pixels_in_a_foreign_segment_fail_the_image() -> None:
    ledger = ledger_with(("v0", 1))
    add(ledger, 1, *files(1))
    effects = ledger.pixels_in("v0", Pixels(1, 0, 1, PixelsRef("airside-t-other", 8, 64, []), 0.1), [], NOW)
    why = "the vision worker sent pixels in a place that is not its to give"
    assert of(VisionFailed, effects) == [VisionFailed(1, f"image 0: {why}")]


def test_a_failed_image_says_which_and_why() -> None:
    ledger = ledger_with(("v0", 3))
    add(ledger, 1, *files(3))
    effects = ledger.image_failed("v0", ImageFailed(1, 2, 1, "truncated", "the file ends early"), NOW)
    assert effects == [VisionFailed(1, "image 2: truncated: the file ends early", "truncated")]
    assert {index for _, (_, index, _) in sent(Cancel, ledger.end(1, NOW))} == {0, 1}


def test_abort_cancels_what_is_in_hand_and_forgets_what_waits() -> None:
    ledger = ledger_with(("v0", 1))
    add(ledger, 1, *files(2))
    assert ledger.end(1, NOW) == [Send("v0", Cancel(1, 0, 1))]
    assert ledger.num_queued == ledger.bytes_waiting == 0
    assert ledger.pixels_in("v0", pixels("v0", 1, 0, slab=8), [], NOW) == [Send("v0", Release(8))]
    ledger.check()


def test_pixels_outlive_their_worker_until_the_last_lease_is_back() -> None:
    ledger = ledger_with(("v0", 2))
    for seq_id in (1, 2, 3):
        add(ledger, seq_id, known(seq_id))
        done(ledger, "v0", seq_id, 0, 1, slab=64 * seq_id)
    ledger.end(3, NOW)  # kept, until its worker is gone
    assert ledger.lose("v0", NOW) == []
    assert ledger.cache_bytes == 0
    assert ledger.pixels(2, 0)[0].slab == 128
    assert ledger.needs_segment_of("v0")
    assert ledger.is_taken("airside-t-v0")
    assert probes(ledger.join("v1", "airside-t-v1", ARENA_BYTES, NOW) + ledger.add(4, [known(1)], NOW))  # made anew
    assert ledger.end(1, NOW) == []
    assert ledger.end(2, NOW) == [SegmentUnused("airside-t-v0")]
    assert not ledger.needs_segment_of("v0")


def test_a_draining_worker_gets_no_more_jobs_but_its_slabs_back() -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, known(1))
    done(ledger, "v0", 1, 0, 1, slab=8)
    ledger.end(1, NOW)
    add(ledger, 2, known(2))
    assert ledger.drain("v0") == [Send("v0", Drain()), Send("v0", Release(8))]
    assert ledger.drain("v0") == []
    assert ledger.add(3, [known(3)], NOW) == [] == ledger.credit("v0", 1, NOW)
    assert ledger.num_workers == 0
    done(ledger, "v0", 2, 0, 1, slab=16)
    assert ledger.end(2, NOW) == [Send("v0", Release(16))]  # nothing is kept


# --- steps, hangs, room -----------------------------------------------------------------------------------------------


def test_each_slab_is_kept_until_no_step_in_flight_reads_it() -> None:
    ledger = ledger_with(("v0", 3))
    for seq_id in (1, 2, 3):
        add(ledger, seq_id, *files(1))
        done(ledger, "v0", seq_id, 0, 1, slab=8 * seq_id)
    ledger.begin_step([1, 2])
    ledger.begin_step([2, 3])
    assert [*ledger.end(1, NOW), *ledger.end(2, NOW), *ledger.end(3, NOW)] == []
    ledger.check()
    assert ledger.close_step() == [Send("v0", Release(8))]
    assert ledger.close_step() == [Send("v0", Release(16)), Send("v0", Release(24))]


def test_lost_steps_keep_nothing() -> None:
    ledger = ledger_with(("v0", 1))
    add(ledger, 1, *files(1))
    done(ledger, "v0", 1, 0, 1, slab=8)
    ledger.begin_step([1])
    ledger.begin_step([1])
    ledger.end(1, NOW)
    assert ledger.drop_steps() == [Send("v0", Release(8))]
    assert ledger.drop_steps() == []


@pytest.mark.parametrize(("later_s", "stuck"), [(19.0, []), (21.0, ["v0"])])
def test_a_worker_with_one_picture_for_too_long_is_stuck(later_s: float, stuck: list[str]) -> None:
    ledger = ledger_with(("v0", 4), ("idle", 0))
    add(ledger, 1, *files(1))
    assert ledger.stuck(NOW + later_s) == stuck


def test_the_clock_is_of_the_oldest_job() -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(1))
    add(ledger, 2, *files(1))
    done(ledger, "v0", 1, 0, 1, now=NOW + 15)
    assert ledger.stuck(NOW + 30) == []
    assert ledger.stuck(NOW + 36) == ["v0"]


def test_only_what_is_overdue_is_blamed() -> None:
    """A job hangs: those behind it, and the header that the worker was asked for lately, are not why."""
    ledger = ledger_with(("v0", 4), limits=VisionLimits(attempts_max=1))
    add(ledger, 1, *files(1))
    add(ledger, 2, *files(1))
    ledger.add(3, files(1), NOW + 19)
    assert ledger.stuck(NOW + 21) == ["v0"]
    assert [failed.seq_id for failed in of(VisionFailed, ledger.lose("v0", NOW + 21))] == [1]


def test_a_worker_that_hangs_on_a_cancelled_job_is_stuck_too() -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(1))
    ledger.end(1, NOW)
    assert ledger.stuck(NOW + 21) == ["v0"]
    ledger.credit("v0", 1, NOW + 21)
    assert ledger.stuck(NOW + 22) == []


@pytest.mark.parametrize("drains_first", [False, True])
def test_a_draining_worker_that_hangs_on_a_cancelled_job_is_stuck_too(drains_first: bool) -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(1))
    for act in (lambda: ledger.drain("v0"), lambda: ledger.end(1, NOW))[:: 1 if drains_first else -1]:
        act()
    assert ledger.stuck(NOW + 19) == []
    assert ledger.stuck(NOW + 21) == ["v0"]
    ledger.credit("v0", 1, NOW + 22)  # it did get on
    assert ledger.stuck(NOW + 60) == []


def test_a_draining_worker_that_only_waits_for_its_slabs_is_not_stuck() -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(1))
    add(ledger, 2, *files(1))
    ledger.drain("v0")
    done(ledger, "v0", 1, 0, 1)
    ledger.end(2, NOW)
    ledger.credit("v0", 1, NOW)
    assert ledger.stuck(NOW + 1000) == []


def test_the_credit_of_a_cancelled_job_is_a_sign_of_progress() -> None:
    """Else a worker whose pictures are all given up on would count as stuck, and the last of them as the reason."""
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(1))
    for seq_id in (1, 2, 3):
        later = NOW + 15 * seq_id
        add(ledger, seq_id + 1, *files(1), now=later)
        ledger.end(seq_id, later)
        ledger.credit("v0", 1, later)
        assert ledger.stuck(later + 19) == []
    assert ledger.stuck(later + 21) == ["v0"]


def test_a_worker_that_waits_for_room_is_not_stuck() -> None:
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    add(ledger, 1, *files(1))
    done(ledger, "v0", 1, 0, 1, num_bytes=960)
    add(ledger, 2, *files(1))
    ledger.arena_full("v0", 64, NOW + 19)
    assert ledger.stuck(NOW + 38) == []
    assert jobs(add(ledger, 3, *files(1))) == []  # nor is it given more
    assert ledger.stuck(NOW + 40) == ["v0"]  # but it does not say so any more


def test_a_picture_that_waits_for_room_moves_to_an_idle_worker_that_has_it() -> None:
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    add(ledger, 1, *files(1))
    done(ledger, "v0", 1, 0, 1, num_bytes=960)
    add(ledger, 2, *files(1))
    ledger.join("v1", "airside-t-v1", ARENA_BYTES, NOW)
    ledger.credit("v1", 4, NOW)
    effects = ledger.arena_full("v0", 64, NOW)
    assert sent(Cancel, effects) == [("v0", (2, 0, 1))]
    assert jobs(effects) == [("v1", (2, 0, 2))]
    ledger.check()


def test_a_request_whose_pictures_never_fit_together_fails() -> None:
    ledger = ledger_with(("v0", 1))
    add(ledger, 1, *files(2))
    done(ledger, "v0", 1, 0, 1, num_bytes=600)
    (failed,) = of(VisionFailed, ledger.arena_full("v0", 600, NOW))
    assert (failed.seq_id, failed.cause) == (1, "arena_too_small")
    assert "take more than 1000 bytes (vision.arena)" in failed.detail


def test_requests_that_wait_for_one_another_s_room_do_not_wait_for_ever() -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, *files(2))
    add(ledger, 2, *files(2))
    done(ledger, "v0", 1, 0, 1, slab=0, num_bytes=400)
    effects = ledger.pixels_in("v0", pixels("v0", 2, 0, slab=512, num_bytes=400), [], NOW)
    assert of(PixelsReady, effects)
    assert of(VisionFailed, ledger.arena_full("v0", 400, NOW)) == [
        VisionFailed(
            2,
            "image 1: the vision worker has no room for it: others wait for room as well (vision.arena)",
            "arena_full",
        )
    ]
    assert ledger.arena_full("v0", 400, NOW) == []  # one is enough
    assert Send("v0", Release(512)) in ledger.end(2, NOW)
    ledger.check()


def test_room_is_looked_for_also_on_a_worker_that_is_busy() -> None:
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    add(ledger, 1, *files(1))
    done(ledger, "v0", 1, 0, 1, num_bytes=960)
    add(ledger, 2, *files(1), size=LARGE)
    ledger.join("v1", "airside-t-v1", ARENA_BYTES, NOW)
    ledger.credit("v1", 4, NOW)
    assert jobs(add(ledger, 3, *files(1))) == [("v1", (3, 0, 1))]
    assert jobs(ledger.arena_full("v0", 64, NOW)) == [("v1", (2, 0, 2))]
    ledger.check()


def test_nobody_fails_for_room_that_others_are_about_to_give_back() -> None:
    """Sequence 3 waits for room that 1 holds, and 1 for room that 2 holds, which waits for nothing."""
    ledger = ledger_with(("v0", 4), ("v1", 4), limits=VisionLimits())
    add(ledger, 2, *files(1))
    done(ledger, "v0", 2, 0, 1, num_bytes=900)
    assert jobs(add(ledger, 1, *files(2))) == [("v1", (1, 0, 1)), ("v0", (1, 1, 1))]
    done(ledger, "v1", 1, 0, 1, num_bytes=900)
    assert ledger.arena_full("v0", 200, NOW) == []
    assert jobs(add(ledger, 3, *files(1))) == [("v1", (3, 0, 1))]
    assert ledger.arena_full("v1", 200, NOW) == []
    assert ledger.end(2, NOW) == [Send("v0", Release(0))]


def test_work_on_other_pictures_hides_no_deadlock() -> None:
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    add(ledger, 1, *files(2))
    done(ledger, "v0", 1, 0, 1, num_bytes=600)
    ledger.join("v1", "airside-t-v1", ARENA_BYTES, NOW)
    ledger.credit("v1", 4, NOW)
    add(ledger, 2, *files(1))
    done(ledger, "v1", 2, 0, 1, num_bytes=900)
    assert jobs(add(ledger, 3, *files(1))) == [("v1", (3, 0, 1))]
    assert [failed.seq_id for failed in of(VisionFailed, ledger.arena_full("v0", 600, NOW))] == [1]


def test_a_worker_that_was_given_room_since_it_asked_for_it_is_asked_again() -> None:
    """What it says had been sent before the room came."""
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    for seq_id, count in ((1, 2), (2, 1)):
        add(ledger, seq_id, *files(count))
        done(ledger, "v0", seq_id, 0, 1, slab=512 * seq_id - 512, num_bytes=480)
    assert ledger.arena_full("v0", 600, NOW) == []
    assert ledger.end(2, NOW) == [Send("v0", Release(512))]
    assert ledger.arena_full("v0", 600, NOW) == []
    assert of(VisionFailed, ledger.arena_full("v0", 600, NOW))


def test_a_worker_is_not_believed_to_wait_for_what_was_taken_from_it() -> None:
    """What it says next may still be of that one, and not of the picture that it got since."""
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    add(ledger, 1, *files(1), ImageFile(memoryview(b""), "http://t/7"))
    done(ledger, "v0", 1, 0, 1, num_bytes=900)
    add(ledger, 2, *files(1))
    assert ledger.arena_full("v0", 200, NOW) == []  # sequence 1 will end
    ledger.fetched("v0", Fetched(1, 1, 1, b"h" * 16, 0.5), [memoryview(b"file")], NOW)
    ledger.shape("v0", shape(1, 1), NOW)
    assert jobs(ledger.end(2, NOW)) == [("v0", (1, 1, 1))]
    assert ledger.arena_full("v0", 200, NOW) == []
    assert of(VisionFailed, ledger.arena_full("v0", 200, NOW))  # it says so again


def test_room_that_a_step_still_reads_is_about_to_come_back() -> None:
    ledger = ledger_with(("v0", 4), limits=VisionLimits())
    for seq_id, count in ((1, 2), (2, 1)):
        add(ledger, seq_id, *files(count))
        done(ledger, "v0", seq_id, 0, 1, slab=512 * seq_id - 512, num_bytes=480)
    ledger.begin_step([2])
    ledger.end(2, NOW)
    assert ledger.arena_full("v0", 600, NOW) == []
    assert ledger.close_step() == [Send("v0", Release(512))]
