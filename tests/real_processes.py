"""What tests on real processes share: a port of their own, and patience."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_port_pair() -> tuple[int, int]:
    """Two ports of 127.0.0.1, one after the other, that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):  # taken, or beyond the last
                continue
            return port, port + 1


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls a condition that no message announces; fails by name when it does not come true."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"still not after {timeout_s:.0f} s: {what}"
        time.sleep(0.02)
