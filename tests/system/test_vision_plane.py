"""Real vision workers that are killed, stopped and abandoned, and pictures that come again: all answers stay right."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


def picture(width: int, height: int, turn: int = 0) -> bytes:
    """A gradient, told from others of the same size by its `turn`."""
    file = io.BytesIO()
    shade = Image.linear_gradient("L").rotate(turn).resize((width, height))
    Image.merge("RGB", (shade, shade.rotate(90).resize((width, height)), shade)).save(file, "PNG")
    return file.getvalue()


def request(*pictures: bytes, max_tokens: int = 4, n: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt="<image>" * len(pictures) + "What is it?",
        images=[pb.Image(data=data) for data in pictures],
        sampling=pb.Sampling(temperature=0),
        n=n,
        stop=pb.Stop(max_tokens=max_tokens, ignore_eos=True),
    )


def ask(server: LocalServer, *pictures: bytes) -> list[int]:
    return Answer(list(server.inference.Generate(request(*pictures), timeout=PATIENCE_S))).token_ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[LocalServer]:
    with LocalServer(checkpoint, vision={"arena": "64MiB"}, engine={"max_num_seqs": 16}) as running:
        yield running


def test_the_same_picture_comes_from_the_cache(server: LocalServer) -> None:
    before, file = server.gauges(), picture(300, 200, 1)
    first, again = (list(server.inference.Generate(request(file), timeout=PATIENCE_S)) for _ in range(2))
    ready = [next(event.image_ready for event in events if event.HasField("image_ready")) for events in (first, again)]
    assert [news.cached for news in ready] == [False, True]
    assert ready[0].tokens == ready[1].tokens
    assert Answer(first).token_ids == Answer(again).token_ids
    after = server.gauges()
    assert after.image_cache_misses - before.image_cache_misses == 1
    assert after.image_cache_hits - before.image_cache_hits == 1
    assert after.image_cache_bytes > before.image_cache_bytes
    wait_until(server.is_at_rest, PATIENCE_S, "everything given back")


def test_continuations_share_one_picture(server: LocalServer) -> None:
    before = server.gauges()
    events = list(server.inference.Generate(request(picture(320, 200, 2), n=3), timeout=PATIENCE_S))
    alone = Answer(events, 0).token_ids
    assert [Answer(events, index).token_ids for index in (1, 2)] == [alone, alone]
    after = server.gauges()
    assert after.image_cache_misses - before.image_cache_misses == 1
    assert after.image_cache_hits - before.image_cache_hits == 2


def test_abandoned_pictures_leave_nothing_behind(server: LocalServer) -> None:
    large = [picture(2000, 1500, turn) for turn in range(3)]
    expected = ask(server, large[0])
    for number in range(30):
        call = server.inference.Generate(request(large[number % 3], picture(40 + number, 30)), timeout=PATIENCE_S)
        assert next(call).HasField("accepted")
        if number % 2:
            next(call)  # at least one picture is there
        call.cancel()
    wait_until(server.is_at_rest, PATIENCE_S, "everything given back")
    assert ask(server, large[0]) == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_vision_worker_that_is_lost_costs_no_answer(checkpoint: Path, how: signal.Signals) -> None:
    """Several pictures are in its hands. Another worker makes them, each as if nothing had happened."""
    vision = {"autoscaling_config": {"min_replicas": 2}, "arena": "64MiB", "cache": {"pixels": "1KiB"}}
    pictures = [picture(1200, 900, turn) for turn in range(6)] + [picture(60, 40 + turn) for turn in range(6)]
    with LocalServer(checkpoint, vision=vision, engine={"max_num_seqs": 16}) as server:
        expected = [ask(server, data) for data in pictures]
        victim = server.processes.pid("vision-0")
        with ThreadPoolExecutor(len(pictures)) as pool:
            answers = [pool.submit(ask, server, data) for data in pictures]
            wait_until(lambda: server.gauges().vision_queue_depth > 0, PATIENCE_S, "pictures at work")
            os.kill(victim, how)
            try:
                assert [answer.result(PATIENCE_S) for answer in answers] == expected
                rows = server.control.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
                assert {row.name: row.state for row in rows}["vision-0"] in ("lost", "busy", "ready")
            finally:
                if how is signal.SIGSTOP:
                    os.kill(victim, signal.SIGKILL)
