"""`airside up` as a child process of the demo: started, watched until it is ready, always stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from airside.proto import airside_pb2 as pb

if TYPE_CHECKING:
    from airside.proto.airside_pb2_grpc import ControlAsyncStub

AIRSIDE_UP = (sys.executable, "-m", "airside.cluster.cli", "up")
POLL_S = 0.2
STOP_TIMEOUT_S = 60.0
_LINES_KEPT = 20


class DemoFailed(Exception):
    """The demo cannot go on; the message is one clear line."""


class DemoServer:
    """A running `airside up CONFIG`.

    Args:
        config: the YAML file.
        address: host:port that the file makes it listen on.
        show: told every line that the server prints.
        command: what is started with `config` as its last argument.

    Raises:
        DemoFailed: something else listens on that address already.
    """

    def __init__(
        self, config: Path, address: str, show: Callable[[str], None], command: Sequence[str] = AIRSIDE_UP
    ) -> None:
        self.address = address
        if _is_taken(address):
            raise DemoFailed(f"{address} is in use; stop that server (airside down) or change server.grpc.port")
        self._last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._show = show
        # A group of its own: Ctrl-C is for the demo, which then stops the server in order.
        self._process = subprocess.Popen(
            [*command, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    async def wait_ready(self, control: ControlAsyncStub, timeout_s: float) -> pb.ServerInfo:
        """What the server says of itself once it is ready.

        Raises:
            DemoFailed: it ended, or was not ready in time.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        state = "not listening yet"
        while asyncio.get_running_loop().time() < deadline:
            self.check_alive()
            try:
                info = await control.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
            else:
                state = info.state
                if state == "ready":
                    return info
            await asyncio.sleep(POLL_S)
        raise DemoFailed(f"the server was not ready within {timeout_s:.0f} s ({state})")

    def check_alive(self) -> None:
        """Raises DemoFailed, with what the server said last, when it has ended."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(1)
            last = self._last_lines[-1] if self._last_lines else "it printed nothing"
            raise DemoFailed(f"the server ended with exit code {code}: {last}")

    async def wait_ended(self) -> int:
        """The exit code, once the server has ended by itself."""
        # Polled, since a thread that waits would keep Ctrl-C from ending the event loop.
        while (code := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    def stop(self) -> bool:
        """Asks the server to shut down and waits; after a minute it is killed. True: it went by itself, no error."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return False
        finally:
            self._reader.join(1)
        return code in (0, -signal.SIGINT, 128 + signal.SIGINT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip())
            self._show(line.rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _is_taken(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1)
        return probe.connect_ex((host.strip("[]"), int(port))) == 0
