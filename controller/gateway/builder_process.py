"""A child process that builds grammars, seen from the gateway."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

from airside.controller.gateway.errors import GatewayError

_START_TIMEOUT_S = 60.0  # Python, llguidance and the vocabulary, on a machine that is busy with loading weights
_GRACE_S = 1.0  # the child's own clock runs out later than the parent's
_MEANT = 0.5  # the part of its time that a child must have computed for that to be the grammar's doing
_PATIENCE = 4  # so many times its time is waited for a child that gets little of the machine
_READ_BYTES = 1 << 16


class BuilderFailed(GatewayError):
    """The child does not start, or cannot use the vocabulary: no grammar is at fault, and none can be checked."""


class BuilderLost(GatewayError):
    """The child was ended, or stood still, for no fault of the grammar's, which may be given to another one."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar is built against.

    Args:
        tokenizer: `tokenizer.json`, its content.
        vocab_size: token ids are below it.
        end_ids: the tokens that end a text.
        chars_max: the context holds no longer text.
    """

    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]
    chars_max: int


@dataclass(frozen=True, slots=True)
class Built:
    """llguidance's serialized form of a grammar."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a grammar cannot be used, as a clause."""

    why: str


class BuilderProcess:
    """One child. It takes one grammar at a time, from one thread at a time; after `Unusable` it may be gone (`alive`).

    Args:
        vocabulary: of all grammars.
        timeout_s: for each of them.
    """

    def __init__(self, vocabulary: Vocabulary, timeout_s: float) -> None:
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self.num_built = 0
        """Grammars it was given so far."""
        # Without preexec_fn: the fork of a process with gRPC's threads may run nothing of Python.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "airside.controller.gateway.grammar_builder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a child that reads nothing must not hold us

    def await_ready(self) -> None:
        """Waits until the child can take grammars: once, before the first.

        Raises:
            BuilderFailed: it did not start.
            BuilderLost: somebody ended it meanwhile.
        """
        setup = dataclasses.asdict(self._vocabulary) | {"timeout_s": self._timeout_s + _GRACE_S}
        try:
            answer = self._ask(setup, _START_TIMEOUT_S)
        except _NoAnswer as none:
            raise BuilderFailed(f"the process that checks grammars does not start: {none}") from none
        if "failed" in answer:
            raise BuilderFailed(f"llguidance cannot use this checkpoint's tokenizer: {answer['failed']}")

    @property
    def alive(self) -> bool:
        """Whether it can take another grammar."""
        return self._process.poll() is None

    def build(self, kind: str, text: str) -> Built | Unusable:
        """The checked grammar. Returns within about the time limit, or some of it later where the child gets too
        little of the machine to use it up; the child is killed when that is over.

        Raises BuilderLost.
        """
        self.num_built += 1
        try:
            answer = self._ask({"kind": kind, "text": text}, self._timeout_s)
        except _NoAnswer as none:
            self.kill()
            return Unusable(str(none))
        except BaseException:
            self.kill()  # its answer may still come, and must never be taken for that to another grammar
            raise
        return Built(answer["grammar"]) if "grammar" in answer else Unusable(answer["refused"])

    def kill(self) -> None:
        """Ends the child, whatever it does. From any thread: a `build` in progress returns. Harmless twice."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the child and lets the pipes go; nothing is called after it."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, request: dict[str, object], timeout_s: float) -> dict[str, str]:
        """Raises _NoAnswer or BuilderLost."""
        clock = _Clock(self._process.pid, timeout_s)
        try:
            self._write(json.dumps(request).encode() + b"\n", clock)
            answer: dict[str, str] = json.loads(self._read_line(clock))
        except TimeoutError:
            raise _NoAnswer(_too_long(timeout_s)) from None
        except (BrokenPipeError, EOFError):
            raise self._cause_of_death() from None
        return answer

    def _write(self, data: bytes, clock: _Clock) -> None:
        """Raises TimeoutError, BuilderLost or BrokenPipeError."""
        assert self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(data)
        while rest:
            _await(descriptor, select.POLLOUT, clock)
            rest = rest[os.write(descriptor, rest) :]

    def _read_line(self, clock: _Clock) -> bytes:
        """Raises TimeoutError, BuilderLost or EOFError."""
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            _await(descriptor, select.POLLIN, clock)
            part = os.read(descriptor, _READ_BYTES)
            if not part:
                raise EOFError
            line += part
        return line

    def _cause_of_death(self) -> _NoAnswer | BuilderLost:
        match -self._process.wait():
            case signal.SIGPROF:
                return _NoAnswer(_too_long(self._timeout_s))
            case signal.SIGABRT:
                return _NoAnswer("it needs too much memory")
            case signal.SIGSEGV | signal.SIGBUS:
                return _NoAnswer("it is nested too deeply")
            case number if number > 0:
                return BuilderLost(f"the process that checks grammars was ended by signal {number}; try again")
            case number:
                return _NoAnswer(f"the process that builds it ended with status {-number}")


class _NoAnswer(Exception):
    """The child did not answer; the message says why, as a clause about what it was given."""


class _Clock:
    """The time of one answer. It is over when the child has computed for a good part of it, and not before."""

    def __init__(self, pid: int, timeout_s: float) -> None:
        self._pid = pid
        self._timeout_s = timeout_s
        self._used_before_s = self._used_s = _cpu_s(pid)
        self._end_s = time.monotonic() + timeout_s
        self._last_end_s = time.monotonic() + _PATIENCE * timeout_s

    def left_ms(self) -> float:
        """Until `extend` is due."""
        return max(0.0, self._end_s - time.monotonic()) * 1000

    def extend(self) -> None:
        """Gives the child more time that has had too little of it.

        Raises:
            TimeoutError: it has used its time up.
            BuilderLost: it stands still, or has hardly been let run for too long.
        """
        used_s, self._used_s = self._used_s, _cpu_s(self._pid)
        if self._used_s - self._used_before_s >= _MEANT * self._timeout_s:
            raise TimeoutError
        if self._used_s == used_s or time.monotonic() > self._last_end_s:
            raise BuilderLost("the process that checks grammars gets no time on this machine; try again")
        self._end_s = time.monotonic() + self._timeout_s / 2


def _cpu_s(pid: int) -> float:
    """What a process has computed so far; 0 when it is gone."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0


def _await(descriptor: int, event: int, clock: _Clock) -> None:
    """Returns once there is something to be done, an error included. Raises TimeoutError or BuilderLost."""
    poll = select.poll()  # select.select takes no descriptor above 1023, and every client has one
    poll.register(descriptor, event)
    while not poll.poll(clock.left_ms()):
        clock.extend()


def _too_long(timeout_s: float) -> str:
    return f"it takes longer than {timeout_s:g} s"
