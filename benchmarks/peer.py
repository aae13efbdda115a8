"""An engine in processes of its own, which is measured beside others; see `peers/`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
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
CHECKPOINT_PRECISION = "bfloat16"
"""Of `text/`, which Airside reads and peers that have no files of their own."""
SERVER_START_S = 300.0
ANSWER_S = 1800.0
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
        bfloat16: what its files of that name hold.
        remark: what else is to be known of its precision.
    """

    name: str
    script: str
    model: str
    has_environment: bool = True
    has_server: bool = False
    bfloat16: str = "bfloat16"
    remark: str = ""

    def python(self, folder: Path) -> Path:
        """The interpreter that runs it."""
        return folder / self.name / "bin" / "python" if self.has_environment else Path(sys.executable)

    def is_installed(self, folder: Path) -> bool:
        """Whether its environment is there and has it."""
        python = self.python(folder)
        return (
            python.exists() and subprocess.run([python, SCRIPTS / self.script, "--check"], check=False).returncode == 0
        )

    def has_precision(self, precision: str) -> bool:
        """Whether there can be files of it: Airside makes its own precision of any, others read what there is."""
        return self.name == OURS or "{}" in self.model or precision == CHECKPOINT_PRECISION

    def command(self, folder: Path, model: Path, options: dict[str, Any]) -> list[str]:
        """That starts it."""
        told = ["--model", str(model), "--options", json.dumps(options)]
        return [str(self.python(folder)), str(SCRIPTS / self.script), *told]


PEERS = [
    Peer(OURS, "run_airside.py", "text", has_environment=False, has_server=True),
    Peer("transformers", "run_transformers.py", "text", has_environment=False),
    Peer("llama.cpp", "run_llama_cpp.py", "{}.gguf", has_server=True),
    Peer("openvino", "run_openvino.py", "openvino-{}", has_server=True, remark="keys and values in 8 bits"),
    Peer("vllm", "run_vllm.py", "text", has_server=True),
    Peer("ctranslate2", "run_ctranslate2.py", "ctranslate2-{}", bfloat16="float32"),
]


class PeerFailed(RuntimeError):
    """An engine did not start, or did not compute; the message has what it said."""


class RunningPeer:
    """An engine with its model loaded. Raises PeerFailed when it does not load.

    Args:
        log: what it prints goes there.
        answer_s: how long loading may take, and each answer; then it is killed.
    """

    def __init__(self, name: str, command: list[str], log: Path, answer_s: float = ANSWER_S) -> None:
        self.name = name
        self._log = log
        self._answer_s = answer_s
        self._ended_peak = 0
        self._is_over = False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        try:
            self._receive()
        except BaseException:  # an interrupt too: it is in a session of its own, and would go on
            self.close()
            raise

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """The seconds it took, by its own clock. Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # it has ended, or was closed
            raise self._failed("ended") from error
        answer = self._receive()
        self._ended_peak = answer["peak_rss_bytes"]
        return float(answer["seconds"])

    def peak_rss_bytes(self) -> int:
        """Of all its processes together, or of the largest of those that have ended. Raises PeerFailed."""
        try:
            return max(peak_of_tree(self._process.pid), self._ended_peak)
        except RuntimeError as error:
            raise self._failed("ended") from error

    def close(self) -> None:
        """Ends it; once or more."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was not read is written once more, to nobody
            self._process.stdin.close()
        self._end()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            kill_group(self._process)

        timer = threading.Timer(self._answer_s, kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            raise self._failed(f"did not answer within {self._answer_s:.0f} s" if is_late.is_set() else "ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer

    def _end(self) -> None:
        if not self._is_over:  # later, its number may be another's
            self._is_over = True
            end(self._process)

    def _failed(self, how: str) -> PeerFailed:
        self._end()  # then it has said all
        return PeerFailed(f"{self.name} {how}:\n{self._log.read_text(errors='replace')[-2000:]}")


@contextmanager
def running_server(name: str, command: list[str], port: int, log: Path) -> Iterator[None]:
    """A peer's server, up within. Raises PeerFailed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--serve", str(port)], stdout=output, stderr=output, start_new_session=True
        )
    try:
        until = time.monotonic() + SERVER_START_S
        while not (is_http_ready(port) if name != OURS else _is_airside_ready(port)):
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
    """Waits for its end, kills it when that takes long, and what it started and left behind."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    kill_group(process)
    process.wait()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills what is left of a process that leads a session of its own, and of what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_http_ready(port: int) -> bool:
    """Whether an OpenAI-style server has its model. Some list it while they load; those have a /health that tells."""
    return _status(port, "/health") in (200, 404) and _status(port, "/v1/models") == 200


def _status(port: int, path: str) -> int | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return None


def _is_airside_ready(port: int) -> bool:
    import grpc

    from airside.cluster.client import Client

    try:
        with Client(f"127.0.0.1:{port}") as client:
            return client.info().state == "ready"
    except grpc.RpcError:
        return False
