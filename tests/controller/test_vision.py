"""Requests with images through a real controller, with scripted vision workers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import IMAGE_TOKEN, Gateway, Rank, VisionWorker, i32, read_i32, read_u64

PROMPT = (11, IMAGE_TOKEN, 12)


def serving(bus: Bus, **changes: object) -> tuple[Gateway, Rank]:
    bus.start(**changes)
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    return gateway, rank


def lose(bus: Bus, worker: VisionWorker) -> None:
    """What the supervisor says when a vision worker's process ends."""
    bus.supervisor(f"tells-{worker.name}").send(msg.PeerLost(worker.name, "exit code -11"))


def test_an_image_request_end_to_end(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.wait_ready(vision=True)
    gateway.add(1, PROMPT, b"the file's bytes", max_tokens=1)
    probe = vision.expect_envelope(msg.Probe)
    assert probe.message == msg.Probe(1, 0, 1)
    assert isinstance(probe.message, msg.Probe)
    vision.shape(probe.message)
    job = vision.expect_envelope(msg.Job)
    assert job.message == msg.Job(1, 0, 1)
    assert isinstance(job.message, msg.Job)
    assert [[bytes(part) for part in sent.attachments] for sent in (probe, job)] == [[b"the file's bytes"]] * 2
    ref = vision.pixels(job.message, slab=4096)
    ready = gateway.expect(msg.ImageReady)
    assert (ready.seq_id, ready.image_index, ready.num_tokens, ready.process_s) == (1, 0, 3, 0.625)
    assert ready.pixels == 600
    assert ready.stages is not None
    assert (ready.cached, ready.stages.decode_s, ready.stages.process_s, ready.stages.fetch_s) == (False, 0.5, 0.125, 0)
    plan = rank.plan()
    while not plan.images:  # the text before the image may have been computed in a step of its own
        rank.answer(plan)
        plan = rank.plan()
    assert plan.images == [msg.ImageRow(1, 0, 0, 3, ref)]
    rank.answer(plan)
    tokens, end = gateway.finish(1)
    assert (tokens, end.prompt_tokens, end.image_tokens) == ([1000], 5, 3)
    assert vision.expect(msg.Release).slab == 4096
    assert gateway.peers()["vision-0"].jobs_done == 1
    gauges = gateway.gauges()
    assert 0 < gauges.gauges["vision_worker_busy_ratio"] < 1
    assert {name: gauges.bus_messages[name] for name in ("AddRequest", "Shape", "Pixels")} == {
        "AddRequest": 1,
        "Shape": 1,
        "Pixels": 1,
    }


def test_text_passes_an_image_that_nobody_works_on(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, PROMPT, b"picture")
    gateway.add(2, max_tokens=1)
    assert read_u64(rank.step().seq_ids) == [2]
    gateway.finish(2)
    assert gateway.gauges().gauges["vision_queue_depth"] == 1


def test_a_lost_vision_worker_costs_a_second_try(bus: Bus) -> None:
    gateway, rank = serving(bus)
    first = bus.vision_worker("vision-0")
    gateway.add(1, PROMPT, b"picture", max_tokens=1)
    first.job()
    rank.step()  # the shape admits the text before the image
    lose(bus, first)
    second = bus.vision_worker("vision-1")
    job = second.job()
    assert job == msg.Job(1, 0, 2)
    second.pixels(job)
    rank.step()
    assert gateway.finish(1)[0] == [1000]


def test_an_image_that_three_vision_workers_died_on_is_refused(bus: Bus) -> None:
    gateway, _ = serving(bus)
    gateway.add(1, (IMAGE_TOKEN, 1, IMAGE_TOKEN), b"fine", b"deadly")
    for attempt in range(1, 4):
        worker = bus.vision_worker(f"vision-{attempt}", credits=2)
        jobs = [worker.job()] if attempt > 1 else [worker.job(), worker.job()]
        if jobs[0].image_index == 0:  # the innocent one, which is tried alone now
            worker.shape(jobs[0])
            worker.pixels(jobs[0])
            if attempt > 1:
                assert worker.job() == msg.Job(1, 1, attempt)
            else:
                gateway.expect(msg.ImageReady)  # or the news of the loss, which others bring, could come before it
        lose(bus, worker)
    _, end = gateway.finish(1)
    assert (end.reason, end.detail) == ("vision_failed", "image 1: vision worker lost: three died on it")
    assert end.image_cause == "worker_lost"


def test_a_failed_image_ends_its_request_and_cancels_the_others(bus: Bus) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0", credits=2)
    gateway.add(1, (IMAGE_TOKEN, 5, IMAGE_TOKEN), b"good", b"bad")
    vision.job()
    job = vision.job()
    vision.send(msg.ImageFailed(1, 1, job.epoch, "truncated", "the file ends early"))
    _, end = gateway.finish(1)
    assert (end.reason, end.detail) == ("vision_failed", "image 1: truncated: the file ends early")
    assert end.image_cause == "truncated"
    assert vision.expect(msg.Cancel) == msg.Cancel(1, 0, 1)
    assert bus.controller is not None
    assert not bus.controller._vision.causes, "told, and forgotten"


def test_each_picture_travels_with_its_range_of_pixels(bus: Bus) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0", credits=2)
    ranges = {"image_min_pixels": [0, 4], "image_max_pixels": [0, 9]}
    gateway.add(1, (IMAGE_TOKEN, 1, IMAGE_TOKEN), b"picture", b"picture", **ranges)
    usual, small = vision.probe(), vision.probe()
    assert (usual, small) == (msg.Probe(1, 0, 1), msg.Probe(1, 1, 1, "", 4, 9))
    vision.shape(small)
    assert vision.job() == msg.Job(1, 1, 1, 4, 9)
    for number, odd in enumerate(([1], [1, -1, 0], [-1, 0]), start=2):
        gateway.add(number, (IMAGE_TOKEN, 1, IMAGE_TOKEN), b"a", b"b", image_min_pixels=odd)
        assert gateway.expect(msg.Rejected).code == "invalid"


@pytest.mark.parametrize(("expansion", "rope_advance"), [(b"", 0), (i32(IMAGE_TOKEN), -1), (i32(IMAGE_TOKEN), 2**40)])
def test_a_shape_that_makes_no_sense_is_not_the_pictures_fault(bus: Bus, expansion: bytes, rope_advance: int) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, PROMPT, b"picture")
    asked = vision.probe()
    vision.send(msg.Shape(1, 0, asked.epoch, expansion, 30, 20, rope_advance))
    _, end = gateway.finish(1)
    assert (end.reason, end.image_cause) == ("vision_failed", "internal")


@pytest.mark.parametrize("side", [-1, 2**63])
def test_a_size_that_no_picture_has_harms_nobody(bus: Bus, side: int) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, PROMPT, b"picture")
    vision.shape(vision.probe(), side, 20)
    vision.pixels(vision.job())
    assert 1 <= gateway.expect(msg.ImageReady).pixels < 2**63


@pytest.mark.parametrize("segment", ["airside-\0", "airside-" + "x" * 300, "../../x"])
def test_a_segment_that_cannot_be_is_no_harm_when_its_worker_is_lost(bus: Bus, segment: str) -> None:
    gateway, _ = serving(bus)
    vision = bus.peer(VisionWorker, "vision-0")
    vision.send(msg.VisionHello("local", vision.pid, segment))
    gateway.wait_ready(vision=True)
    lose(bus, vision)
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
    bus.vision_worker("vision-1")
    gateway.wait_ready(vision=True)


def test_a_segment_belongs_to_one_worker(bus: Bus) -> None:
    gateway, _ = serving(bus)
    first = bus.vision_worker("vision-0")
    gateway.wait_ready(vision=True)
    second = bus.peer(VisionWorker, "vision-1")
    second.send(msg.VisionHello("local", second.pid, first.segment))
    assert "was used before" in second.expect(msg.Shutdown).why
    assert [name for name in gateway.peers() if name.startswith("vision")] == ["vision-0"]


def test_messages_of_an_earlier_epoch_are_harmless(bus: Bus) -> None:
    gateway, rank = serving(bus)
    first = bus.vision_worker("vision-0")
    gateway.add(1, PROMPT, b"picture", max_tokens=1)
    first.job()
    second = bus.vision_worker("vision-1", credits=0)
    lose(bus, first)
    second.send(msg.Credit(1))
    job = second.job()
    stale = msg.Job(1, 0, 1)
    second.send(msg.ImageFailed(1, 0, 1, "truncated", "an old story"))
    second.pixels(stale, slab=777)
    assert second.expect(msg.Release).slab == 777
    second.pixels(job, slab=4)
    gateway.expect(msg.ImageReady)
    plan = rank.plan()
    while not plan.images:
        rank.answer(plan)
        plan = rank.plan()
    assert plan.images[0].pixels.slab == 4


def test_an_aborted_request_cancels_its_job_and_late_pixels_go_back(bus: Bus) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, PROMPT, b"picture")
    job = vision.job()
    gateway.send(msg.AbortSequence(1, "cancelled"))
    assert gateway.finish(1)[1].detail == "cancelled"
    vision.expect(msg.Cancel)
    vision.pixels(job, slab=64)
    assert vision.expect(msg.Release).slab == 64


def test_pixels_in_a_step_in_flight_are_kept_until_it_is_over(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, (IMAGE_TOKEN,), b"picture")
    vision.pixels(vision.job(), slab=32)
    plan = rank.plan()
    assert plan.images
    gateway.send(msg.AbortSequence(1, "cancelled"))
    gateway.finish(1)
    assert not vision.heard(msg.Release)
    rank.answer(plan)
    assert vision.expect(msg.Release).slab == 32


def test_a_vision_worker_that_hangs_is_given_up(bus: Bus) -> None:
    gateway, _ = serving(bus, image_job_timeout_s=0.3)
    hangs, supervisor = bus.vision_worker("vision-0"), bus.supervisor()
    gateway.add(1, PROMPT, b"picture")
    job = hangs.job()
    stuck = supervisor.expect(msg.PeerStuck)
    assert (stuck.name, stuck.pid, stuck.why) == (
        "vision-0",
        hangs.pid,
        "one picture took more than 0.3 s (vision.job_timeout_s)",
    )
    other = bus.vision_worker("vision-1")
    assert other.job() == msg.Job(1, 0, 2)
    hangs.shape(job)  # lost peers that wake up are told so
    hangs.expect(msg.Shutdown)


def test_a_lost_worker_keeps_its_segment_while_pixels_in_it_are_needed(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=1)
    vision.pixels(vision.job())
    plan = rank.plan()
    lose(bus, vision)  # wrongly: it lives on
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
    vision.send(msg.Heartbeat(1))
    bus.await_received(msg.Heartbeat)  # before the answer, which frees the segment
    rank.answer(plan)
    gateway.finish(1)
    gateway.gauges()
    assert vision.link.receive(0) is None
    vision.send(msg.Heartbeat(1))
    vision.expect(msg.Shutdown)


def test_the_segment_of_a_dead_worker_goes_with_its_last_lease(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0")
    segment = Path("/dev/shm") / vision.segment
    segment.touch()
    try:
        gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=1)
        vision.pixels(vision.job())
        plan = rank.plan()
        lose(bus, vision)
        gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
        assert segment.exists()
        rank.answer(plan)
        assert gateway.finish(1)[0] == [1000]
        gateway.gauges()  # answered after the end was seen to
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_the_same_picture_is_made_once(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0", segment_bytes=4096)
    same = {"image_hashes": [b"h" * 16], "max_tokens": 1}
    gateway.add(1, PROMPT, b"picture", **same)
    vision.pixels(vision.job(), slab=64)
    assert not gateway.expect(msg.ImageReady).cached
    rank.step_until_end(gateway, 1)
    gateway.add(2, PROMPT, b"picture", **same)
    ready = gateway.expect(msg.ImageReady)
    assert (ready.seq_id, ready.cached, ready.process_s) == (2, True, 0)
    rank.step_until_end(gateway, 2)
    gauges = gateway.gauges().gauges
    assert (gauges["image_cache_hits"], gauges["image_cache_misses"], gauges["image_cache_bytes"]) == (1, 1, 64)
    assert not vision.heard(msg.Release)


def test_continuations_of_one_request_share_their_pictures(bus: Bus) -> None:
    gateway, rank = serving(bus)
    arrival = time.time()
    for seq_id in (1, 2, 3):
        gateway.add(seq_id, PROMPT, b"picture", request_id="n", arrival=arrival, image_hashes=[b"h" * 16], max_tokens=1)
    gateway.accepted(3)
    assert gateway.gauges().gauges["image_bytes_waiting"] == len(b"picture")
    vision = bus.vision_worker("vision-0", credits=3)
    vision.pixels(vision.job())
    assert [gateway.expect(msg.ImageReady).cached for _ in range(3)] == [False, True, True]
    rank.step_until_end(gateway, 1, 2, 3)
    assert not vision.heard(msg.Job)


def test_more_bytes_than_may_wait_are_refused_for_now(bus: Bus) -> None:
    gateway, rank = serving(bus, image_bytes_max=10)
    gateway.add(1, PROMPT, b"7 bytes", max_tokens=1)
    gateway.accepted(1)
    gateway.add(2, PROMPT, b"4 by")
    refused = gateway.expect(msg.Rejected)
    assert (refused.seq_id, refused.code) == (2, "queue_full")
    assert "vision.limits.max_waiting_bytes" in refused.detail
    gateway.add(3, PROMPT, b"more than 10")
    assert gateway.expect(msg.Rejected).code == "invalid"  # trying again would not help
    gauges = gateway.gauges().gauges
    assert gauges["image_bytes_waiting"] == 7
    assert gauges["vision_wait_s"] > 0
    vision = bus.vision_worker("vision-0")
    vision.pixels(vision.job())
    rank.step_until_end(gateway, 1)
    gateway.add(4, PROMPT, b"4 by")
    gateway.accepted(4)


def test_pictures_wait_for_the_first_vision_worker(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, PROMPT, b"picture", max_tokens=1)
    gateway.accepted(1)
    vision = bus.vision_worker("vision-0")
    assert vision.probe() == msg.Probe(1, 0, 1)
    vision.shape(msg.Probe(1, 0, 1))
    vision.pixels(vision.job())
    rank.step_until_end(gateway, 1)
    assert gateway.finish(1)[0] == [1000]


def test_a_picture_that_is_fetched(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0")
    url = "https://example.org/a.png"
    gateway.add(1, PROMPT, b"", image_urls=[url], image_hashes=[b""], max_tokens=1)
    assert vision.probe() == msg.Probe(1, 0, 1, url)
    vision.send(msg.Fetched(1, 0, 1, b"h" * 16, 0.5), b"the file")
    vision.pixels(vision.job())
    ready = gateway.expect(msg.ImageReady)
    assert ready.stages is not None
    assert ready.stages.fetch_s == 0.5
    plan = rank.plan()
    while not plan.images:
        rank.answer(plan)
        plan = rank.plan()
    assert plan.images[0].content_hash == b"h" * 16


def test_columns_of_images_that_do_not_fit_are_refused(bus: Bus) -> None:
    gateway, _ = serving(bus)
    gateway.add(1, PROMPT, b"picture", image_urls=["", ""])
    gateway.add(2, PROMPT, b"picture", image_hashes=[b"h" * 16, b"h" * 16])
    gateway.add(3, PROMPT)
    assert [gateway.expect(msg.Rejected).code for _ in range(3)] == ["invalid"] * 3


def test_a_drained_vision_worker_leaves(bus: Bus) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0", credits=2)
    gateway.wait_ready(vision=True)
    bus.supervisor().send(msg.DrainVision("vision-0"))
    vision.expect(msg.Drain)
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
    assert gateway.peers()["vision-0"].state == "draining"
    gateway.add(1, PROMPT, b"picture")
    vision.send(msg.Goodbye())
    assert not vision.heard(msg.Job)
    assert "vision-0" not in gateway.peers()


def test_scaling_is_passed_to_the_supervisor(bus: Bus) -> None:
    bus.start(vision_target=2)
    gateway = bus.gateway()
    gateway.send(msg.ScaleVision(8, 3))
    refused = gateway.expect(msg.ScaleVisionOutcome)
    assert (refused.replicas, "supervisor" in refused.refused) == (2, True)
    supervisor = bus.supervisor()
    assert not supervisor.heard(msg.VisionTarget)  # it knows how many there are to be at first
    gateway.send(msg.ScaleVision(9, 3))
    assert gateway.expect(msg.ScaleVisionOutcome) == msg.ScaleVisionOutcome(9, 3, "")
    assert supervisor.expect(msg.VisionTarget) == msg.VisionTarget(3)
    gateway.send(msg.ScaleVision(10, 5))
    too_many = gateway.expect(msg.ScaleVisionOutcome)
    assert (too_many.replicas, too_many.is_out_of_range) == (3, True)
    assert "must be in [0, 4] (vision.autoscaling_config.max_replicas)" in too_many.refused
    supervisor.send(msg.VisionPool(3, "no CPU is free for vision-2"))
    supervisor.heard(msg.VisionTarget)
    gateway.send(msg.PeersQuery(1))
    peers = gateway.expect(msg.Peers)
    assert (peers.vision_target, peers.vision_pending) == (3, "no CPU is free for vision-2")


def test_a_range_is_passed_on_and_told_again_to_a_supervisor_that_was_lost(bus: Bus) -> None:
    bus.start(vision_target=2)
    gateway, supervisor = bus.gateway(), bus.supervisor()
    supervisor.expect(msg.VisionLoad)  # it has joined
    gateway.send(msg.ScaleVision(1, 0, 1))
    assert gateway.expect(msg.ScaleVisionOutcome) == msg.ScaleVisionOutcome(1, 0, "", replicas_max=1)
    assert supervisor.expect(msg.VisionTarget) == msg.VisionTarget(0, 1)
    gateway.send(msg.PeersQuery(1))
    assert gateway.expect(msg.Peers).vision_target == 1  # the nearest to 2
    for replicas, replicas_max in ((1, 5), (3, 2), (-1, 2)):
        gateway.send(msg.ScaleVision(2, replicas, replicas_max))
        refused = gateway.expect(msg.ScaleVisionOutcome)
        assert refused.is_out_of_range
        assert f"range is {replicas} to {replicas_max}, but must be rising and in [0, 4]" in refused.refused
    supervisor.send(msg.SupervisorHello("local", supervisor.pid))
    assert supervisor.expect(msg.VisionTarget) == msg.VisionTarget(0, 1)


def test_the_supervisor_hears_who_is_up(bus: Bus) -> None:
    serving(bus)
    supervisor = bus.supervisor()
    supervisor.expect(msg.VisionLoad)  # it has joined
    bus.vision_worker("vision-3")
    assert supervisor.expect(msg.VisionJoined) == msg.VisionJoined("vision-3")


def test_the_supervisor_hears_the_load_again_and_again(bus: Bus) -> None:
    gateway, _ = serving(bus)
    supervisor = bus.supervisor()
    for _ in range(3):  # they come by themselves
        assert supervisor.expect(msg.VisionLoad) == msg.VisionLoad(0, 0, 0, 0.0)
    gateway.add(1, PROMPT, b"picture")
    needed = supervisor.expect(msg.VisionLoad, lambda load: load.queued == 1)
    assert (needed.workers, needed.in_hand) == (0, 0)
    vision = bus.vision_worker("vision-0")
    job = vision.job()
    assert supervisor.expect(msg.VisionLoad, lambda load: load.in_hand == 1).workers == 1
    vision.pixels(job)
    done = supervisor.expect(msg.VisionLoad, lambda load: load.in_hand == 0 and load.done > 0)
    assert (done.queued, done.done) == (0, 1)
    assert supervisor.expect(msg.VisionLoad).done == 0


def test_an_empty_pool_can_serve_when_it_fills_by_itself(bus: Bus) -> None:
    gateway, _ = serving(bus)
    supervisor = bus.supervisor()
    supervisor.send(msg.VisionPool(0, "", fewest=0, most=2))
    gateway.wait_ready(vision=True)
    supervisor.send(msg.VisionPool(1, "3 vision workers in a row failed to start", fewest=0, most=2))
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
    supervisor.send(msg.VisionPool(1, "", fewest=0, most=2))
    gateway.expect(msg.EngineState, lambda state: state.vision_ready)
    supervisor.send(msg.VisionPool(0, "", fewest=0, most=0))  # exactly none was asked for
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)


def test_a_text_model_takes_no_images_and_scales_nothing(bus: Bus) -> None:
    bus.start(image_token_id=None)
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, PROMPT, b"picture")
    assert gateway.expect(msg.Rejected).code == "invalid"
    gateway.send(msg.ScaleVision(1, 2))
    refused = gateway.expect(msg.ScaleVisionOutcome)
    assert ("no images" in refused.refused, refused.is_out_of_range) == (True, False)
    gateway.add(2, PROMPT, image_positions=[], max_tokens=1)
    assert read_i32(rank.step().token_ids) == list(PROMPT)
