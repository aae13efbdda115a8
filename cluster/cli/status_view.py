"""How `airside status` shows a server."""

from __future__ import annotations

from rich.table import Table

from airside.cluster.config.byte_size import format_rough_bytes
from airside.proto import airside_pb2 as pb


def workers_table(reply: pb.ListWorkersReply) -> Table:
    """One row per process."""
    table = Table("role", "name", "rank", "node", "pid", "state", "heard", "images", "memory", box=None, pad_edge=False)
    for worker in reply.workers:
        table.add_row(
            worker.role,
            worker.name,
            str(worker.rank) if worker.role == "worker" else "",
            worker.node,
            str(worker.pid),
            worker.state,
            f"{worker.last_heard_s:.1f} s",
            str(worker.jobs_done) if worker.role == "vision_worker" else "",
            format_rough_bytes(worker.rss_bytes) if worker.rss_bytes else "",
        )
    return table


def summary_lines(info: pb.ServerInfo, reply: pb.ListWorkersReply) -> list[str]:
    """The model, the load and the vision pool, in a few lines."""
    gauges = info.gauges
    tp = info.tensor_parallel_size
    lines = [
        f"{info.model}: {info.architecture}, {info.dtype} on {info.device}, tensor parallel {tp}, {info.state}",
        f"requests: {gauges.num_requests_running} running, {gauges.num_requests_waiting} waiting; "
        f"KV blocks: {gauges.kv_blocks_live} of {gauges.kv_blocks_total} in use; "
        f"tokens: {gauges.prompt_tokens} read, {gauges.generation_tokens} made",
    ]
    if gauges.prefix_cache_queries:
        hits, queries = gauges.prefix_cache_hits, gauges.prefix_cache_queries
        lines.append(f"prefix cache: {hits} of {queries} prompt tokens found, {gauges.kv_blocks_cached} blocks kept")
    if gauges.draft_tokens:
        lines.append(f"drafts: {gauges.accepted_tokens} of {gauges.draft_tokens} tokens accepted")
    if info.accepts_images:
        pending = f" ({reply.vision_pending})" if reply.vision_pending else ""
        lines.append(
            f"vision workers: {gauges.vision_workers} of {reply.vision_target}{pending}; "
            f"{gauges.vision_queue_depth} images wait"
        )
    return lines
