"""A gateway's metrics over HTTP, with a controller that answers, or does not."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from airside.controller.gateway import engine_metrics
from airside.controller.gateway.metrics_server import MetricsServer
from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.server import EXIT_ADDRESS_BUSY
from airside.proto import messages as msg
from airside.proto.messages import ImageStages
from airside.proto.settings import GatewaySettings
from tests.gateway.client import Client
from tests.gateway.conftest import Start
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.gateway.test_generate import image
from tests.gateway.test_process import started
from tests.gateway.tiny_checkpoint import byte_level_tokenizer
from tests.real_processes import free_port
from tests.scrape import Samples, scrape

TOKEN = byte_level_tokenizer().token_to_id("a")


@pytest.fixture
def pool_of_one() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def answer(controller: ScriptedController, scraping: Future[Samples], **gauges: float) -> Samples:
    """Answers the two questions of a scrape."""
    controller.send(msg.Gauges(controller.expect(msg.GaugesQuery).query_id, gauges, {}, {}))
    controller.send(msg.Peers(controller.expect(msg.PeersQuery).query_id, [], 0, ""))
    return scraping.result(20)


def test_a_scrape_has_what_the_gateway_counted_and_what_the_controller_says(
    start_gateway: Start, controller: ScriptedController, pool: DescriptorPool, pool_of_one: ThreadPoolExecutor
) -> None:
    port = free_port()
    gateway = start_gateway(metrics_port=port)
    before = answer(controller, pool_of_one.submit(scrape, port), prompt_tokens=5)
    assert before["airside_controller_up"] == 1
    assert before["airside_prompt_tokens_total"] == 5
    call = Client(pool, gateway.channel).generate(prompt="a<image>", images=[image(b"file")])
    request = controller.accept()
    stages = ImageStages(0.0, 0.5, 0.25, 0.125, 0.0625)
    controller.send(msg.ImageReady(request.seq_id, 0, 4, 0.375, cached=False, stages=stages, pixels=600))
    controller.send(msg.ImageEncoded(request.seq_id, 0, 2.0))
    controller.send(batch((request.seq_id, [TOKEN])))
    controller.send(batch((request.seq_id, [TOKEN] * 2), finished=[finish(request.seq_id, "length")]))
    list(call)
    after = answer(controller, pool_of_one.submit(scrape, port), prompt_tokens=5)
    changed = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    counts = {name: value for name, value in changed.items() if not name.endswith("_sum") and "_bucket" not in name}
    assert counts == {
        'airside_requests_finished_total{reason="length"}': 1,
        "airside_time_to_first_token_seconds_count": 1,
        "airside_inter_token_latency_seconds_count": 2,
        "airside_e2e_request_latency_seconds_count": 1,
        "airside_request_queue_time_seconds_count": 1,
        "airside_image_wait_seconds_count": 1,
        "airside_image_queue_seconds_count": 1,
        "airside_image_decode_seconds_count": 1,
        "airside_image_process_seconds_count": 1,
        "airside_image_transport_seconds_count": 1,
        "airside_image_encode_seconds_count": 1,
        "airside_image_bytes_count": 1,
        "airside_image_pixels_count": 1,
    }
    assert changed["airside_image_pixels_sum"] == 600
    assert changed["airside_image_bytes_sum"] == 4
    assert changed["airside_image_encode_seconds_sum"] == 2.0


def test_a_controller_that_does_not_answer_takes_nothing_else_along(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, pool_of_one: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(engine_metrics, "ANSWER_S", 0.2)
    port = free_port()
    start_gateway(metrics_port=port)
    found = pool_of_one.submit(scrape, port).result(20)
    assert found["airside_controller_up"] == 0
    assert found["airside_image_bytes_count"] == 0
    assert "airside_prompt_tokens_total" not in found, "a counter that is not known is not 0"


def test_all_gateways_but_one_leave_the_engine_out(start_gateway: Start) -> None:
    """The controller is not even asked: the scrape is answered though nobody answers the gateway."""
    port = free_port()
    start_gateway(metrics_port=port, metrics_of_engine=False)
    found = scrape(port)
    assert found["airside_image_bytes_count"] == 0
    assert not [name for name in found if "controller" in name or "kv_blocks" in name]


def test_a_scraper_that_says_nothing_holds_up_nobody(start_gateway: Start) -> None:
    port = free_port()
    start_gateway(metrics_port=port, metrics_of_engine=False)
    with socket.create_connection(("127.0.0.1", port)):
        assert "airside_image_bytes_count" in scrape(port)


def test_a_port_that_is_taken_ends_the_process_with_the_key_to_change(settings: GatewaySettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(dataclasses.replace(settings, metrics_port=port)) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_ADDRESS_BUSY, errors
    assert f"server.metrics.port: cannot listen on 127.0.0.1:{port}: Address already in use" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(host: str) -> None:
    port = free_port()
    server = MetricsServer(host, port, RequestMetrics().registry)
    try:
        assert "airside_image_bytes_count" in scrape(port, "[::1]")
    finally:
        server.close()
