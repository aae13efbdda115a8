"""What a gateway counts of its requests, and what it makes of the controller's numbers."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from airside.controller.gateway.engine_metrics import engine_families
from airside.controller.gateway.request_metrics import RequestMetrics, TokenTimes
from airside.proto.messages import Gauges, ImageEncoded, ImageReady, ImageStages, PeerRow, Peers
from tests.gateway.scripted_controller import finish
from tests.scrape import Samples, samples_of

ARRIVAL = 1000.0


def samples(metrics: RequestMetrics) -> Samples:
    return samples_of(generate_latest(metrics.registry).decode())


def seconds(metrics: RequestMetrics, name: str) -> tuple[float, float]:
    """How many durations, and their sum."""
    found = samples(metrics)
    return found[f"airside_{name}_seconds_count"], found[f"airside_{name}_seconds_sum"]


def test_the_first_token_counts_from_the_call_and_the_others_from_one_another() -> None:
    metrics, times = RequestMetrics(), TokenTimes(ARRIVAL)
    metrics.tokens_came(times, 1, ARRIVAL + 0.5)
    metrics.tokens_came(times, 1, ARRIVAL + 0.75)
    assert seconds(metrics, "time_to_first_token") == (1, 0.5)
    assert seconds(metrics, "inter_token_latency") == (1, 0.25)


def test_tokens_that_come_at_once_share_their_gap() -> None:
    metrics, times = RequestMetrics(), TokenTimes(ARRIVAL)
    metrics.tokens_came(times, 3, ARRIVAL + 1)
    metrics.tokens_came(times, 4, ARRIVAL + 2)
    assert seconds(metrics, "inter_token_latency") == (4, 1.0)
    assert samples(metrics)['airside_inter_token_latency_seconds_bucket{le="0.3"}'] == 4
    assert samples(metrics)['airside_inter_token_latency_seconds_bucket{le="0.15"}'] == 0


def test_an_end_is_counted_by_its_reason() -> None:
    metrics = RequestMetrics()
    metrics.finished("stop", finish(1), ARRIVAL, ARRIVAL + 2)
    metrics.finished("stop", finish(2), ARRIVAL, ARRIVAL + 3)
    metrics.finished("abort", None, ARRIVAL, ARRIVAL + 4)
    found = samples(metrics)
    assert found['airside_requests_finished_total{reason="stop"}'] == 2
    assert found['airside_requests_finished_total{reason="abort"}'] == 1
    assert found['airside_requests_finished_total{reason="vision_failed"}'] == 0, "without it the first is no increase"
    assert seconds(metrics, "e2e_request_latency") == (3, 9.0)
    assert seconds(metrics, "request_queue_time") == (2, 2 * finish(1).queued_s)


def test_stages_that_did_not_happen_are_not_counted() -> None:
    metrics = RequestMetrics()
    stages = ImageStages(queue_s=0.5, decode_s=0.25, process_s=0.125, transport_s=0.0625)
    metrics.image_ready(ImageReady(1, 0, 4, 0.375, cached=False, stages=stages), ARRIVAL, ARRIVAL + 1)
    metrics.image_ready(ImageReady(2, 0, 4, 0.0, cached=True, stages=ImageStages()), ARRIVAL, ARRIVAL + 1)
    metrics.image_ready(ImageReady(3, 0, 4, 0.0), ARRIVAL, ARRIVAL + 1)  # nothing is known of its stages
    assert seconds(metrics, "image_wait") == (3, 3.0)
    assert seconds(metrics, "image_fetch") == (0, 0.0)
    assert seconds(metrics, "image_queue") == (1, 0.5)
    assert seconds(metrics, "image_decode") == (1, 0.25)
    assert seconds(metrics, "image_process") == (1, 0.125)
    assert seconds(metrics, "image_transport") == (1, 0.0625)


def test_embeddings_that_were_found_took_no_time() -> None:
    metrics = RequestMetrics()
    metrics.image_encoded(ImageEncoded(1, 0, 0.5))
    metrics.image_encoded(ImageEncoded(2, 0, 0.0))
    assert seconds(metrics, "image_encode") == (1, 0.5)


def test_the_size_of_an_image_is_counted_where_it_is_known() -> None:
    metrics = RequestMetrics()
    metrics.image_sized(640 * 480)
    metrics.image_sized(0)
    found = samples(metrics)
    assert (found["airside_image_pixels_count"], found["airside_image_pixels_sum"]) == (1, 640 * 480)
    assert found['airside_image_pixels_bucket{le="1.048576e+06"}'] == 1
    assert found['airside_image_pixels_bucket{le="262144.0"}'] == 0


def test_files_are_counted_and_those_to_be_fetched_are_not() -> None:
    metrics = RequestMetrics()
    metrics.images_came([b"x" * 3000, b"", b"y" * 1000])
    found = samples(metrics)
    assert (found["airside_image_bytes_count"], found["airside_image_bytes_sum"]) == (2, 4000)


class _Fixed(Collector):
    def __init__(self, gauges: Gauges, peers: Peers) -> None:
        self._answers = gauges, peers

    def collect(self):  # type: ignore[no-untyped-def]
        return engine_families(*self._answers)


def engine_samples(gauges: Gauges, rows: list[PeerRow]) -> Samples:
    registry = CollectorRegistry()
    registry.register(_Fixed(gauges, Peers(1, rows, 0, "", {"up_load": 4}, {"hung": 3})))
    return samples_of(generate_latest(registry).decode())


def peer(role: str, state: str) -> PeerRow:
    return PeerRow(role, f"{role}-{state}", 0, "node", 1, state, 0.0, 0, 0)


def test_the_controllers_numbers_have_the_names_that_people_know() -> None:
    gauges = {"num_requests_running": 3, "prompt_tokens": 2**40 + 1, "image_cache_hits": 7, "vision_wait_s": 0.5}
    gauges |= {"embedding_cache_misses": 4, "embedding_cache_bytes": 512, "vision_worker_busy_ratio": 0.75}
    gauges |= {"kv_blocks_total": 8, "kv_blocks_live": 2, "kv_blocks_cached": 5, "kv_blocks_free": 1}
    answer = Gauges(1, gauges, {"stop": 5}, {"malformed": 6}, {"schedule": 0.25}, {"StepResult": 2**33})
    states = ["ready", "busy", "busy", "lost"]
    found = engine_samples(answer, [peer("worker", "busy"), *(peer("vision_worker", state) for state in states)])
    expected = {
        "airside_num_requests_running": 3,
        "airside_num_requests_waiting": 0,
        "airside_prompt_tokens_total": 2**40 + 1,
        "airside_generation_tokens_total": 0,
        'airside_image_cache_hits_total{level="pixels"}': 7,
        'airside_image_cache_hits_total{level="embeddings"}': 0,
        'airside_image_cache_misses_total{level="embeddings"}': 4,
        'airside_image_cache_bytes{level="embeddings"}': 512,
        "airside_vision_worker_busy_ratio": 0.75,
        'airside_vision_restarts_total{reason="hung"}': 3,
        'airside_vision_restarts_total{reason="died"}': 0,
        'airside_bus_messages_total{kind="StepResult"}': 2**33,
        "airside_vision_predicted_wait_seconds": 0.5,
        "airside_kv_cache_usage_ratio": 0.25,
        'airside_kv_blocks{state="live"}': 2,
        'airside_kv_blocks{state="cached"}': 5,
        'airside_kv_blocks{state="free"}': 1,
        'airside_vision_workers{state="ready"}': 1,
        'airside_vision_workers{state="busy"}': 2,
        'airside_vision_workers{state="draining"}': 0,
        'airside_vision_scale_events_total{direction="up",reason="load"}': 4,
        'airside_vision_scale_events_total{direction="down",reason="asked"}': 0,
        'airside_bus_messages_refused_total{why="malformed"}': 6,
        'airside_controller_step_seconds{phase="schedule"}': 0.25,
    }
    assert {name: found[name] for name in expected} == expected
    assert 'airside_vision_workers{state="lost"}' not in found
    assert not [name for name in found if not name.startswith("airside_")]


def test_a_controller_without_an_engine_has_numbers_too() -> None:
    found = engine_samples(Gauges(1, {}, {}, {}), [])
    assert found["airside_kv_cache_usage_ratio"] == found["airside_num_requests_running"] == 0


@pytest.mark.parametrize("stopped", ["gauge", "counter"])
def test_no_number_of_the_controller_is_misspelt(stopped: str) -> None:
    """Each key that is read is one that `Gauges` of the public API documents."""
    from airside.controller.gateway import engine_metrics
    from airside.proto import airside_pb2 as pb

    read = engine_metrics._GAUGES if stopped == "gauge" else engine_metrics._COUNTERS
    keys = {key for key, _ in read.values()}
    keys |= {
        f"{begin}_{what}" for begin in engine_metrics._IMAGE_LEVELS.values() for what in ("hits", "misses", "bytes")
    }
    assert keys <= {field.name for field in pb.Gauges.DESCRIPTOR.fields}
