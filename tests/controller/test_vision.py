"""Requests with images through a real controller, with scripted vision workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from airside.controller import controller
from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import IMAGE_TOKEN, Gateway, Rank, VisionWorker, read_i32, read_u64

PROMPT = (11, IMAGE_TOKEN, 12)


def serving(bus: Bus) -> tuple[Gateway, Rank]:
    bus.start()
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
    envelope = vision.expect_envelope(msg.Job)
    job = envelope.message
    assert job == msg.Job(1, 0, 1)
    assert [bytes(part) for part in envelope.attachments] == [b"the file's bytes"]
    assert isinstance(job, msg.Job)
    vision.shape(job)
    ref = vision.pixels(job, slab=4096)
    assert gateway.expect(msg.ImageReady) == msg.ImageReady(1, 0, 3, 0.125)
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
    first.shape(first.job())
    rank.step()  # the shape admits the text before the image
    lose(bus, first)
    second = bus.vision_worker("vision-1")
    job = second.job()
    assert job == msg.Job(1, 0, 2)
    second.shape(job)
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
        lose(bus, worker)
    _, end = gateway.finish(1)
    assert (end.reason, end.detail) == ("vision_failed", "image 1: three vision workers died on it")


def test_a_failed_image_ends_its_request_and_cancels_the_others(bus: Bus) -> None:
    gateway, _ = serving(bus)
    vision = bus.vision_worker("vision-0", credits=2)
    gateway.add(1, (IMAGE_TOKEN, 5, IMAGE_TOKEN), b"good", b"bad")
    vision.job()
    job = vision.job()
    vision.send(msg.ImageFailed(1, 1, job.epoch, "truncated", "the file ends early"))
    _, end = gateway.finish(1)
    assert (end.reason, end.detail) == ("vision_failed", "image 1: truncated: the file ends early")
    assert vision.expect(msg.Cancel) == msg.Cancel(1, 0, 1)


def test_messages_of_an_earlier_epoch_are_harmless(bus: Bus) -> None:
    gateway, rank = serving(bus)
    first, second = bus.vision_worker("vision-0"), bus.vision_worker("vision-1", credits=0)
    gateway.add(1, PROMPT, b"picture", max_tokens=1)
    first.job()
    lose(bus, first)
    second.send(msg.Credit(1))
    job = second.job()
    stale = msg.Job(1, 0, 1)
    second.send(msg.ImageFailed(1, 0, 1, "truncated", "an old story"))
    second.pixels(stale, slab=777)
    assert second.expect(msg.Release).slab == 777
    second.shape(job)
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
    job = vision.job()
    vision.shape(job)
    vision.pixels(job, slab=32)
    plan = rank.plan()
    assert plan.images
    gateway.send(msg.AbortSequence(1, "cancelled"))
    gateway.finish(1)
    assert not vision.heard(msg.Release)
    rank.answer(plan)
    assert vision.expect(msg.Release).slab == 32


def test_a_vision_worker_that_hangs_is_given_up(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "JOB_SILENCE_MAX_S", 0.3)
    gateway, _ = serving(bus)
    hangs, supervisor = bus.vision_worker("vision-0"), bus.supervisor()
    gateway.add(1, PROMPT, b"picture")
    job = hangs.job()
    stuck = supervisor.expect(msg.PeerStuck)
    assert (stuck.name, stuck.pid, "no progress" in stuck.why) == ("vision-0", hangs.pid, True)
    other = bus.vision_worker("vision-1")
    assert other.job() == msg.Job(1, 0, 2)
    hangs.shape(job)  # lost peers that wake up are told so
    hangs.expect(msg.Shutdown)


def test_a_lost_worker_keeps_its_segment_while_pixels_in_it_are_needed(bus: Bus) -> None:
    gateway, rank = serving(bus)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, (IMAGE_TOKEN,), b"picture", max_tokens=1)
    job = vision.job()
    vision.shape(job)
    vision.pixels(job)
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
        job = vision.job()
        vision.shape(job)
        vision.pixels(job)
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
    assert supervisor.expect(msg.VisionTarget).replicas == 2
    gateway.send(msg.ScaleVision(9, 3))
    assert gateway.expect(msg.ScaleVisionOutcome) == msg.ScaleVisionOutcome(9, 3, "")
    assert supervisor.expect(msg.VisionTarget).replicas == 3
    gateway.send(msg.ScaleVision(10, 5))
    too_many = gateway.expect(msg.ScaleVisionOutcome)
    assert (too_many.replicas, too_many.is_out_of_range) == (3, True)
    assert "must be in [0, 4] (vision.max_replicas)" in too_many.refused
    supervisor.send(msg.VisionPool(3, "no CPU is free for vision-2"))
    supervisor.heard(msg.VisionTarget)
    gateway.send(msg.PeersQuery(1))
    peers = gateway.expect(msg.Peers)
    assert (peers.vision_target, peers.vision_pending) == (3, "no CPU is free for vision-2")


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
