"""The controller's numbers for Prometheus, asked for at each scrape.

They are of the whole server, and live in the controller: counters go on when a worker is replaced, and begin again only
with a new controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from airside.controller.gateway.controller_link import ControllerLink
from airside.controller.gateway.errors import ControllerSilent
from airside.proto.messages import Gauges, GaugesQuery, PeerRow, Peers, PeersQuery

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a scrape waits for the controller; far less than the ten seconds that Prometheus waits by default."""

_GAUGES = {  # metric: key of messages.Gauges, meaning
    "num_requests_running": ("num_requests_running", "Sequences that take part in steps."),
    "num_requests_waiting": ("num_requests_waiting", "Sequences that wait for their turn, or for images."),
    "vision_queue_depth": ("vision_queue_depth", "Images that wait for a vision worker."),
    "vision_predicted_wait_seconds": ("vision_wait_s", "How long an image that came now would wait."),
    "vision_worker_busy_ratio": (
        "vision_worker_busy_ratio",
        "Share of the last half minute in which vision workers had an image in hand, from 0 to 1.",
    ),
    "image_waiting_bytes": ("image_bytes_waiting", "Image files that wait for their pixels."),
}

_COUNTERS = {
    "steps": ("steps", "Steps of the model."),
    "num_preemptions": ("num_preemptions", "Sequences that lost their KV blocks to others or with the workers."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens that were computed again."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were computed, each counted once."),
    "generation_tokens": ("generation_tokens", "Tokens that were made."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found there."),
    "draft_tokens": ("draft_tokens", "Draft tokens that were verified."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted."),
}

_IMAGE_LEVELS = {"pixels": "image_cache", "embeddings": "embedding_cache"}
"""What is kept of an image: the label, and how the keys of messages.Gauges begin."""

_BLOCK_STATES = ("live", "cached", "free")
_VISION_STATES = ("ready", "busy", "draining")
_RESTART_REASONS = ("died", "hung", "not_started", "with_the_controller")


class EngineCollector(Collector):
    """Asks the controller when it is collected, which happens in a thread of the metrics server.

    Args:
        link: to the controller; belongs to `loop`.
        loop: runs as long as this may be collected.
    """

    def __init__(self, link: ControllerLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing: without it, to be registered would mean to be collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All there is; without an answer in time, that there was none."""
        try:
            gauges, peers = asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(2 * ANSWER_S)
        except (TimeoutError, CancelledError, ControllerSilent) as error:  # cancelled: the gateway is stopping
            log.warning("metrics: no answer of the controller: %s", error or type(error).__name__)
            yield _controller_up(False)
            return
        yield _controller_up(True)
        yield from engine_families(gauges, peers)

    async def _ask(self) -> tuple[Gauges, Peers]:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.gather(self._link.query(GaugesQuery, Gauges), self._link.query(PeersQuery, Peers))


def engine_families(gauges: Gauges, peers: Peers) -> Iterator[Metric]:
    """The controller's answers as metrics. What it does not know yet is 0."""
    values = gauges.gauges
    for name, (key, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"airside_{name}", text, value=values.get(key, 0))
    for name, (key, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"airside_{name}", text, value=values.get(key, 0))
    used, total = values.get("kv_blocks_live", 0), values.get("kv_blocks_total", 0)
    text = "Share of the KV blocks that live sequences hold, from 0 to 1."
    yield GaugeMetricFamily("airside_kv_cache_usage_ratio", text, value=used / total if total else 0)
    blocks = {state: values.get(f"kv_blocks_{state}", 0) for state in _BLOCK_STATES}
    yield _labelled(GaugeMetricFamily("airside_kv_blocks", "KV blocks.", labels=["state"]), blocks)
    yield _labelled(
        GaugeMetricFamily("airside_vision_workers", "Vision workers.", labels=["state"]), _vision_workers(peers.peers)
    )
    text = "Changes of the number of vision workers that are wanted; `asked`: by an operator."
    scaled = CounterMetricFamily("airside_vision_scale_events", text, labels=["direction", "reason"])
    for direction, reason in (("up", "load"), ("down", "load"), ("up", "asked"), ("down", "asked")):
        scaled.add_metric([direction, reason], peers.vision_scale_events.get(f"{direction}_{reason}", 0))
    yield scaled
    text = "Vision workers that others took the place of; `not_started`: before they were up."
    yield _labelled(
        CounterMetricFamily("airside_vision_restarts", text, labels=["reason"]),
        dict.fromkeys(_RESTART_REASONS, 0) | peers.vision_restarts,
    )
    yield from _image_caches(values)
    text = "The controller's own work per step, median of the last 512."
    yield _labelled(
        GaugeMetricFamily("airside_controller_step_seconds", text, labels=["phase"]), gauges.controller_phase_s
    )
    text = "Messages between processes that came to the controller."
    yield _labelled(CounterMetricFamily("airside_bus_messages", text, labels=["kind"]), gauges.bus_messages)
    text = "Messages between processes that were refused."
    yield _labelled(
        CounterMetricFamily("airside_bus_messages_refused", text, labels=["why"]), gauges.bus_messages_refused
    )


def _image_caches(values: Mapping[str, float]) -> Iterator[Metric]:
    """What images had left for equal ones, by level."""

    def of(what: str) -> Mapping[str, float]:
        return {level: values.get(f"{begin}_{what}", 0) for level, begin in _IMAGE_LEVELS.items()}

    text = "Images that found what an equal one had left, or that was being made for it."
    yield _labelled(CounterMetricFamily("airside_image_cache_hits", text, labels=["level"]), of("hits"))
    text = "Images that found nothing."
    yield _labelled(CounterMetricFamily("airside_image_cache_misses", text, labels=["level"]), of("misses"))
    text = "Pixels that no live request uses, in shared memory, and embeddings, on each rank."
    yield _labelled(GaugeMetricFamily("airside_image_cache_bytes", text, labels=["level"]), of("bytes"))


def _controller_up(is_up: bool) -> Metric:
    return GaugeMetricFamily("airside_controller_up", "Whether the controller answered this scrape.", value=int(is_up))


def _vision_workers(rows: Iterable[PeerRow]) -> Mapping[str, int]:
    """Numbers by state. Lost ones stay in the list for an operator to see, and are no workers any more."""
    return dict.fromkeys(_VISION_STATES, 0) | Counter(
        row.state for row in rows if row.role == "vision_worker" and row.state != "lost"
    )


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family
