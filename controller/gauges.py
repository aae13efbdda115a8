"""Answers about the whole, gathered from those who own its parts: the numbers of `airside.v1.Gauges`, and the peers."""

from __future__ import annotations

import time

from airside._core import Engine, Stats
from airside.controller.engine_host import EngineHost
from airside.controller.peers import Peers
from airside.controller.step_clock import StepClock
from airside.controller.supervisor_desk import SupervisorDesk
from airside.controller.vision.desk import VisionDesk
from airside.controller.vision.ledger import VisionLedger
from airside.proto import messages as msg
from airside.proto.channel import Hub


def gather_gauges(
    query_id: int, engine: Engine | None, ledger: VisionLedger, vision: VisionDesk, clock: StepClock, hub: Hub
) -> msg.Gauges:
    """The answer to a `GaugesQuery`. Without an engine yet, its numbers are left out, which reads as 0."""
    now = time.monotonic()
    gauges: dict[str, float] = {
        "vision_queue_depth": ledger.num_queued,
        "vision_workers": ledger.num_workers,
        "vision_wait_s": ledger.load(now).wait_s,
        "vision_worker_busy_ratio": vision.busy_ratio(now),
        "image_bytes_waiting": ledger.bytes_waiting,
        "image_cache_hits": ledger.num_hits,
        "image_cache_misses": ledger.num_misses,
        "image_cache_bytes": ledger.cache_bytes,
        "embedding_cache_hits": vision.embeddings.num_hits,
        "embedding_cache_misses": vision.embeddings.num_misses,
        "embedding_cache_bytes": vision.embeddings.num_bytes,
        "controller_step_s": clock.median_s,
    }
    finished: dict[str, int] = {}
    if engine is not None:
        stats = engine.stats()
        gauges |= _engine_gauges(stats)
        finished = dict(stats.finished)
    return msg.Gauges(query_id, gauges, finished, dict(hub.refused), clock.medians_s(), dict(hub.received))


def _engine_gauges(stats: Stats) -> dict[str, float]:
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_blocks_total": stats.blocks_total,
        "kv_blocks_live": stats.blocks_live,
        "kv_blocks_cached": stats.blocks_cached,
        "kv_blocks_free": stats.blocks_free,
        "num_preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "state_slots_total": stats.state_slots_total,
        "state_slots_live": stats.state_slots_live,
    }


def gather_peers(
    query_id: int, now: float, peers: Peers, host: EngineHost, ledger: VisionLedger, supervision: SupervisorDesk
) -> msg.Peers:
    """The answer to a `PeersQuery`. `now` is of the clock of `peers`."""
    rows = peers.rows(now, ledger.worker_states() | host.rank_states(), ledger.jobs_done())
    return msg.Peers(
        query_id,
        rows,
        supervision.vision_target,
        supervision.vision_pending,
        supervision.vision_scale_events,
        supervision.vision_restarts,
    )
