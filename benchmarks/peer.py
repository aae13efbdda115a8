"""An engine in processes of its own, which is measured beside others; see `peers/`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airside.cluster.bench.memory import peak_of_tree

SCRIPTS = Path(__file__).resolve().parent / "peers"
OURS = "Airside"
SERVER_START_S = 300.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of an engine before it is started.

    Args:
        name: of it, and of its environment's folder.
        script: in `peers/`.
        model: its path under the folder of a model's forms; with `{}`, by precision.
        has_environment: it is not run by this Python.
        has_server: one that speaks OpenAI's API, or is Airside's.
    """

    name: str
    script: str
    model: str
    has_environment: bool = True
    has_server: bool = False

    def python(self, folder: Path) -> Path:
        """The interpreter that runs it."""
        return folder / self.name / "bin" / "python" if self.has_environment else Path(sys.executable)

    def is_installed(self, folder: Path) -> bool:
        """Whether its environment is there and has it."""
        python = self.python(folder)
        return (
            python.exists() and subprocess.run([python, SCRIPTS / self.script, "--check"], check=False).returncode == 0
        )

    def command(self, folder: Path, model: Path, options: dict[str, Any]) -> list[str]:
        """That starts it."""
        told = ["--model", str(model), "--options", json.dumps(options)]
        return [str(self.python(folder)), str(SCRIPTS / self.script), *told]


PEERS = [
    Peer(OURS, "run_airside.py", "text", has_environment=False, has_server=True),
    Peer("transformers", "run_transformers.py", "text", has_environment=False),
    Peer("llama.cpp", "run_llama_cpp.py", "{}.gguf", has_server=True),
    Peer("openvino", "run_openvino.py", "openvino-{}", has_server=True),
    Peer("vllm", "run_vllm.py", "text", has_server=True),
    Peer("ctranslate2", "run_ctranslate2.py", "ctranslate2-{}"),
]


class PeerFailed(RuntimeError):
    """An engine did not start, or did not compute; the message has what it said."""


class RunningPeer:
    """An engine with its model loaded. Raises PeerFailed when it does not load.

    Args:
        log: what it prints goes there.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        self._ended_peak = 0
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self._receive()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """The seconds it took, by its own clock. Raises PeerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._receive()
        self._ended_peak = answer["peak_rss_bytes"]
        return float(answer["seconds"])

    def peak_rss_bytes(self) -> int:
        """Of all its processes together, or of the largest of those that have ended."""
        return max(peak_of_tree(self._process.pid), self._ended_peak)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        end(self._process)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end(self._process)
            raise PeerFailed(f"{self.name} ended:\n{self._log.read_text(errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer


@contextmanager
def running_server(name: str, command: list[str], port: int, log: Path) -> Iterator[None]:
    """A peer's server, up within. Raises PeerFailed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--serve", str(port)], stdout=output, stderr=output, start_new_session=True
        )
    try:
        until = time.monotonic() + SERVER_START_S
        while not (_lists_models(port) if name != OURS else _is_airside_ready(port)):
            if process.poll() is not None or time.monotonic() > until:
                raise PeerFailed(f"{name}'s server is not up:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGINT if name == OURS else signal.SIGTERM)
        end(process)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[Any]) -> None:
    """Waits for its end; kills it and what it started when that takes long."""
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lists_models(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _is_airside_ready(port: int) -> bool:
    import grpc

    from airside.cluster.client import Client

    try:
        with Client(f"127.0.0.1:{port}") as client:
            return client.info().state == "ready"
    except grpc.RpcError:
        return False
