"""A child process that builds grammars, seen from the gateway."""

from __future__ import annotations

import contextlib
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


class BuilderProcess:
    """One child. It takes one grammar at a time, from one thread at a time; after `Unusable` it may be gone (`alive`).

    Args:
        vocabulary: of all grammars.
        timeout_s: for each of them.

    Raises:
        BuilderFailed: it did not start.
        BuilderLost: somebody ended it at once.
    """

    def __init__(self, vocabulary: Vocabulary, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.num_built = 0
        """Grammars it was given so far."""
        # Without preexec_fn: the fork of a process with gRPC's threads may run nothing of Python.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "airside.controller.gateway.grammar_builder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        setup = {
            "tokenizer": vocabulary.tokenizer,
            "vocab_size": vocabulary.vocab_size,
            "end_ids": vocabulary.end_ids,
            "chars_max": vocabulary.chars_max,
            "timeout_s": timeout_s + _GRACE_S,
        }
        try:
            answer = self._ask(setup, _START_TIMEOUT_S)
        except _NoAnswer as none:
            self.close()
            raise BuilderFailed(f"the process that checks grammars does not start: {none}") from none
        except BuilderLost:
            self.close()
            raise
        if "failed" in answer:
            self.close()
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
            return Unusable(str(none))
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
            with contextlib.suppress(OSError):  # what could not be written any more
                pipe.close()

    def _ask(self, request: dict[str, object], timeout_s: float) -> dict[str, str]:
        """Raises _NoAnswer or BuilderLost."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        end_s = time.monotonic() + timeout_s
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except OSError:
            raise _NoAnswer(self._cause_of_death()) from None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise _NoAnswer(_too_long(timeout_s))
            part = os.read(stdout.fileno(), _READ_BYTES)
            if not part:
                raise _NoAnswer(self._cause_of_death())
            line += part
        answer: dict[str, str] = json.loads(line)
        return answer

    def _cause_of_death(self) -> str:
        match -self._process.wait():
            case signal.SIGALRM:
                return _too_long(self._timeout_s)
            case signal.SIGABRT:
                return "it needs too much memory"
            case signal.SIGSEGV | signal.SIGBUS:
                return "it is nested too deeply"
            case number if number > 0:
                raise BuilderLost(f"the process that checks grammars was ended by signal {number}; try again")
            case number:
                return f"the process that builds it ended with status {-number}"


class _NoAnswer(Exception):
    """The child did not answer; the message says why, as a clause about what it was given."""


def _too_long(timeout_s: float) -> str:
    return f"it takes longer than {timeout_s:g} s"
