"""Waits for the vision pool to have the size that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

from airside.cluster.client import Client

_ASK_EVERY_S = 0.2


def wait_for_vision(client: Client, replicas: int, timeout_s: float, tell: Callable[[str], None]) -> str:
    """Returns "" once there are exactly as many vision workers as asked for, or else why there are not."""
    until = time.monotonic() + timeout_s
    last = ""
    while True:
        reply = client.list_workers()
        states = [worker.state for worker in reply.workers if worker.role == "vision_worker" and worker.state != "lost"]
        up = sum(state in ("ready", "busy") for state in states)
        now = f"vision workers: {up} up, {states.count('draining')} draining, {replicas} wanted"
        if now != last:
            last = now
            tell(now)
        if len(states) == up == replicas:
            return ""
        if time.monotonic() > until:
            return reply.vision_pending or f"{now} after {timeout_s:g} s"
        time.sleep(_ASK_EVERY_S)
