"""Waits for the vision pool to have the size that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

from airside.cluster.cli.vision_size import VisionSize
from airside.cluster.client import Client

_ASK_EVERY_S = 0.2


def wait_for_vision(client: Client, size: VisionSize, timeout_s: float, tell: Callable[[str], None]) -> str:
    """Returns "" once all vision workers that are wanted are up and no others, or else why they are not.

    Of a range, those are wanted that the load asks for by then.
    """
    until = time.monotonic() + timeout_s
    last = ""
    while True:
        reply = client.list_workers()
        wanted = reply.vision_target if size.holds(reply.vision_target) else size.fewest
        states = [worker.state for worker in reply.workers if worker.role == "vision_worker" and worker.state != "lost"]
        up = sum(state in ("ready", "busy") for state in states)
        now = f"vision workers: {up} up, {states.count('draining')} draining, {wanted} wanted"
        if now != last:
            last = now
            tell(now)
        if len(states) == up == wanted:
            return ""
        if time.monotonic() > until:
            return reply.vision_pending or f"{now} after {timeout_s:g} s"
        time.sleep(_ASK_EVERY_S)
