"""A child process that builds grammars, seen from the gateway."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from airside.controller.gateway.errors import GatewayError

_START_TIMEOUT_S = 60.0  # Python, llguidance and the vocabulary, on a machine that is busy with loading weights
_GRACE_S = 1.0  # the child's own clock runs out later than the parent's
_READ_BYTES = 1 << 16


class BuilderFailed(GatewayError):
    """The child does not start, or cannot use the vocabulary: no grammar is at fault, and none can be checked."""


class BuilderLost(GatewayError):
    """Somebody ended the child; the same grammar may be given to another one."""


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
    is_for_time: bool = False
    """It took too long, which may have been for other work on the machine: another time it may be built."""


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
        """The checked grammar. Returns within about the time limit; the child is killed when that is over.

        Raises BuilderLost.
        """
        self.num_built += 1
        try:
            answer = self._ask({"kind": kind, "text": text}, self._timeout_s)
        except _NoAnswer as none:
            self.kill()
            return Unusable(str(none), is_for_time=isinstance(none, _TooLong))
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
        end_s = time.monotonic() + timeout_s
        try:
            self._write(json.dumps(request).encode() + b"\n", end_s)
            answer: dict[str, str] = json.loads(self._read_line(end_s))
        except TimeoutError:
            raise _TooLong(timeout_s) from None
        except (BrokenPipeError, EOFError):
            raise self._cause_of_death() from None
        return answer

    def _write(self, data: bytes, end_s: float) -> None:
        """Raises TimeoutError or BrokenPipeError."""
        assert self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(data)
        while rest:
            _await(descriptor, select.POLLOUT, end_s)
            rest = rest[os.write(descriptor, rest) :]

    def _read_line(self, end_s: float) -> bytes:
        """Raises TimeoutError or EOFError."""
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            _await(descriptor, select.POLLIN, end_s)
            part = os.read(descriptor, _READ_BYTES)
            if not part:
                raise EOFError
            line += part
        return line

    def _cause_of_death(self) -> _NoAnswer | BuilderLost:
        match -self._process.wait():
            case signal.SIGALRM:
                return _TooLong(self._timeout_s)
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


class _TooLong(_NoAnswer):
    """It did not in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"it takes longer than {timeout_s:g} s")


def _await(descriptor: int, event: int, end_s: float) -> None:
    """Returns once there is something to be done, an error included. Raises TimeoutError at `end_s`."""
    poll = select.poll()  # select.select takes no descriptor above 1023, and every client has one
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
        raise TimeoutError
