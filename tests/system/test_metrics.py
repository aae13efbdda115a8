"""What Prometheus reads of a real server: exact numbers of what was asked of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.real_processes import free_port, wait_until
from tests.scrape import Samples, scrape
from tests.system.local_server import Answer, LocalServer
from tests.system.test_serving import picture

pytestmark = pytest.mark.slow

NUM_TOKENS = 6


class MeasuredServer(LocalServer):
    """A server whose metrics are read."""

    def scrape(self) -> Samples:
        return scrape(self.plan.config.server.metrics.port)

    def ask(self, prompt: str, *images: bytes) -> Answer:
        """Exactly `NUM_TOKENS` tokens."""
        return self.generate(
            prompt=prompt,
            images=[pb.Image(data=image) for image in images],
            sampling=pb.Sampling(temperature=0),
            stop=pb.Stop(max_tokens=NUM_TOKENS, ignore_eos=True),
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with MeasuredServer(model, vision={"arena": "64MiB"}, server={"metrics": {"port": free_port()}}) as running:
        yield running


def changes(before: Samples, after: Samples) -> Samples:
    """By how much each sample has grown, unless it has not; those that were not there count from 0."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value}


def counts(grown: Samples) -> Samples:
    """Those that are whole numbers whatever the time taken, but for those of blocks, steps and the bus."""
    ends = ("_sum", "_ratio", "airside_steps_total", "prefix_cache_hits_total", "prefix_cache_queries_total")
    parts = ("_bucket{", "{phase", "kv_blocks{", "bus_messages_total{")
    return {
        name: value
        for name, value in grown.items()
        if not name.endswith(ends) and not any(part in name for part in parts)
    }


def test_texts_are_counted_token_by_token(server: MeasuredServer) -> None:
    before = server.scrape()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(server.ask, ("The red", "A small green circle", "Two")))
    grown = changes(before, server.scrape())
    assert counts(grown) == {
        'airside_requests_finished_total{reason="length"}': 3,
        "airside_prompt_tokens_total": sum(
            answer.finished.usage.prompt_tokens - answer.finished.usage.cached_tokens for answer in answers
        ),
        "airside_generation_tokens_total": 3 * NUM_TOKENS,
        "airside_time_to_first_token_seconds_count": 3,
        "airside_inter_token_latency_seconds_count": 3 * (NUM_TOKENS - 1),
        "airside_e2e_request_latency_seconds_count": 3,
        "airside_request_queue_time_seconds_count": 3,
    }
    assert grown["airside_e2e_request_latency_seconds_sum"] >= grown["airside_time_to_first_token_seconds_sum"] > 0


def test_a_client_that_goes_away_is_an_abort(server: MeasuredServer) -> None:
    before = server.scrape()
    request = pb.GenerateRequest(prompt="The", stop=pb.Stop(max_tokens=1000, ignore_eos=True))
    call = server.inference.Generate(request)
    assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    call.cancel()
    wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")
    grown = changes(before, server.scrape())
    assert grown['airside_requests_finished_total{reason="abort"}'] == 1
    assert grown["airside_e2e_request_latency_seconds_count"] == 1
    assert "airside_request_queue_time_seconds_count" not in grown, "nobody read what the engine said of it"


def test_equal_pictures_are_made_and_encoded_once(server: MeasuredServer) -> None:
    """Four requests at once, each with the same two pictures, one of them twice. The texts before them differ, so that
    the prefix cache knows none of their tokens."""
    dark, light = picture(60, 40), picture(40, 90)
    before = server.scrape()
    prompts = [f"{text}<image>and<image>and<image>" for text in ("a", "be", "sea", "d")]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: server.ask(prompt, dark, light, dark), prompts))
    grown = changes(before, server.scrape())
    num_images, num_distinct = 12, 2
    expected = {
        'airside_requests_finished_total{reason="length"}': 4,
        "airside_generation_tokens_total": 4 * NUM_TOKENS,
        "airside_image_wait_seconds_count": num_images,
        "airside_image_bytes_count": num_images,
        "airside_image_bytes_sum": 4 * (2 * len(dark) + len(light)),
        "airside_image_decode_seconds_count": num_distinct,
        "airside_image_process_seconds_count": num_distinct,
        "airside_image_encode_seconds_count": num_distinct,
        'airside_image_cache_misses_total{level="pixels"}': num_distinct,
        'airside_image_cache_hits_total{level="pixels"}': num_images - num_distinct,
        'airside_image_cache_misses_total{level="embeddings"}': num_distinct,
        'airside_image_cache_hits_total{level="embeddings"}': num_images - num_distinct,
        "airside_image_pixels_count": num_images,
        "airside_image_pixels_sum": 4 * (2 * 60 * 40 + 40 * 90),
        'airside_bus_messages_total{kind="AddRequest"}': 4,
        'airside_bus_messages_total{kind="Pixels"}': num_distinct,
    }
    assert {name: grown.get(name, 0) for name in expected} == expected
    assert "airside_image_fetch_seconds_count" not in grown
    ends = [answer.finished for answer in answers]
    assert sum(end.usage.cached_images for end in ends) == num_images - num_distinct
    assert sum(end.timings.image_encode_s > 0 for end in ends) <= num_distinct, "one pays, the others find them"
    total = sum(end.timings.image_encode_s for end in ends)
    assert total == pytest.approx(grown["airside_image_encode_seconds_sum"])
    for stage in ("queue", "decode", "process", "transport"):
        told = sum(getattr(end.timings.images, f"{stage}_s") for end in ends)
        assert told == pytest.approx(grown.get(f"airside_image_{stage}_seconds_sum", 0)), stage


def test_a_picture_that_was_seen_before_costs_no_stage(server: MeasuredServer) -> None:
    seen = picture(50, 50)
    server.ask("First<image>", seen)
    before = server.scrape()
    answer = server.ask("Then another<image>", seen)
    grown = changes(before, server.scrape())
    assert answer.finished.usage.cached_images == 1
    assert answer.finished.timings.image_encode_s == 0
    assert grown['airside_image_cache_hits_total{level="pixels"}'] == grown["airside_image_wait_seconds_count"] == 1
    made = [name for name in grown if "_seconds_count" in name and "image_" in name and "image_wait" not in name]
    assert not made


def test_counters_never_go_back_when_ranks_are_replaced(server: MeasuredServer) -> None:
    server.ask("Before<image>", picture(33, 44))
    before = server.scrape()
    server.replace_ranks(2, signal.SIGKILL)
    wait_until(lambda: "launch=2" in server.processes.log("controller"), 60, "new ranks")
    server.ask("After<image>", picture(33, 44))
    after = server.scrape()
    counters = [name for name in before if "_total" in name or name.endswith("_count")]
    assert len(counters) > 20
    assert not {name: (before[name], after[name]) for name in counters if after[name] < before[name]}
    grown = changes(before, after)
    assert grown["airside_generation_tokens_total"] == NUM_TOKENS
    assert grown["airside_image_encode_seconds_count"] == 1, "the new rank has embeddings of its own to make"
    assert grown['airside_image_cache_misses_total{level="embeddings"}'] == 1
