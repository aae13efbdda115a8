"""Checks what a request says of its text's form, and turns it into the grammar that the model workers build.

A grammar is built and tried in a child process (`builder_process.py`), since one from a client may take minutes, all
memory or the whole stack. Each has a time limit; others are built meanwhile, and the event loop waits for none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import grpc

from airside.controller.gateway.builder_pool import BUILDERS_MAX, BuilderPool
from airside.controller.gateway.builder_process import BuilderFailed, BuilderLost, Built, Unusable
from airside.controller.gateway.errors import RETRY_AFTER_S, RequestError, invalid, unavailable
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto.settings import GatewaySettings

PENDING_MAX = 64
"""Checks that may wait for a child; more are refused with RESOURCE_EXHAUSTED."""

_CACHED_MAX = 1024
_CACHED_BYTES_MAX = 32 * 1024 * 1024

_REMEDIES = {
    "json_schema": "send a JSON Schema of supported keywords that some value meets",
    "json_object": "leave it out",
    "regex": "send a regular expression for the whole text, in the syntax of Rust's regex, without look-around",
    "choice": "send fewer or shorter texts",
    "lark": "send a context-free grammar in Lark's notation with a rule `start`",
    "gbnf": "send a context-free grammar in GBNF with a rule `root`",
}

Outcome = Built | Unusable


class GrammarChecker:
    """Grammars of requests, checked. Remembers what it has seen, good and bad.

    Args:
        settings: of the gateway: limits of time and size.
        model: whose vocabulary the grammars are for.
    """

    def __init__(self, settings: GatewaySettings, model: TextModel) -> None:
        self._bytes_max = settings.grammar_bytes_max
        self._builders = BuilderPool(model, settings.max_model_len, settings.grammar_timeout_s)
        self._threads = ThreadPoolExecutor(BUILDERS_MAX, thread_name_prefix="grammar")
        self._lock = threading.RLock()  # of the two below; a future that is cancelled calls back at once
        self._pending: dict[bytes, _Check] = {}
        self._seen = _Seen()

    async def check(self, structure: pb.Structure) -> str:
        """llguidance's serialized grammar; "" when no kind is set.

        Raises:
            RequestError: INVALID_ARGUMENT, with the field, for a grammar that cannot be used; FAILED_PRECONDITION
                where no grammar can be checked; RESOURCE_EXHAUSTED where too many are waiting; UNAVAILABLE when the
                child was killed or gets no time on the machine, or the server stops.
        """
        kind, text = self._checked_text(structure)
        if not kind:
            return ""
        with _failures_told(), self._outcome(kind, text) as outcome:
            # Shielded: others may wait for the same grammar.
            return _grammar(kind, await asyncio.shield(asyncio.wrap_future(outcome)))

    def check_blocking(self, structure: pb.Structure) -> str:
        """As `check`, for callers without an event loop."""
        kind, text = self._checked_text(structure)
        if not kind:
            return ""
        with _failures_told(), self._outcome(kind, text) as outcome:
            return _grammar(kind, outcome.result())

    def close(self) -> None:
        """Ends the children; checks in progress are refused."""
        self._builders.close()
        self._threads.shutdown(cancel_futures=True)

    def _checked_text(self, structure: pb.Structure) -> tuple[str, str]:
        """Kind and text of the grammar, within limits; ("", "") without any. Raises RequestError."""
        kind = structure.WhichOneof("kind")
        if kind is None:
            return "", ""
        field = f"structure.{kind}"
        if kind == "json_object":
            if not structure.json_object:
                raise invalid(field, "is false; leave it out for free text, or set it to true for a JSON object")
            return kind, ""
        text = _choice(structure.choice) if kind == "choice" else getattr(structure, kind)
        assert isinstance(text, str)
        if not text.strip():
            raise invalid(field, f"is empty; leave it out, or {_REMEDIES[kind]}")
        size = len(text.encode())
        if size > self._bytes_max:
            raise invalid(field, f"has {size} bytes, at most {self._bytes_max} are allowed; send a smaller one")
        return kind, text

    @contextlib.contextmanager
    def _outcome(self, kind: str, text: str) -> Iterator[Future[Outcome]]:
        """The outcome, now or later; equal grammars are built once. Raises RequestError when too many wait.

        A check that has not begun when the last one who waits for it leaves is not begun any more.
        """
        key = blake2b(f"{kind}\0{text}".encode(), digest_size=16).digest()
        with self._lock:
            check = self._seen_check(key) or self._pending.get(key) or self._begin(key, kind, text)
            check.num_waiting += 1
        try:
            yield check.future
        finally:
            with self._lock:
                check.num_waiting -= 1
                if not check.num_waiting:
                    check.future.cancel()

    def _seen_check(self, key: bytes) -> _Check | None:
        seen = self._seen.get(key)
        if seen is None:
            return None
        done: Future[Outcome] = Future()
        done.set_result(seen)
        return _Check(done)

    def _begin(self, key: bytes, kind: str, text: str) -> _Check:
        if len(self._pending) >= PENDING_MAX:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{PENDING_MAX} grammars are being checked already; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        check = self._pending[key] = _Check(self._threads.submit(self._build, kind, text))
        check.future.add_done_callback(lambda future: self._remember(key, future))
        return check

    def _build(self, kind: str, text: str) -> Outcome:
        with self._builders.builder() as builder:
            return builder.build(kind, text)

    def _remember(self, key: bytes, future: Future[Outcome]) -> None:
        with self._lock:
            del self._pending[key]
            if not future.cancelled() and future.exception() is None:
                self._seen.put(key, future.result())


@dataclass(slots=True)
class _Check:
    """A grammar under way, and how many calls wait for it."""

    future: Future[Outcome]
    num_waiting: int = 0


class _Seen:
    """Outcomes by grammar, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[bytes, Outcome] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes) -> Outcome | None:
        """None: not seen, or forgotten."""
        if key in self._outcomes:
            self._outcomes.move_to_end(key)
        return self._outcomes.get(key)

    def put(self, key: bytes, outcome: Outcome) -> None:
        """Remembers an outcome that is not there."""
        self._outcomes[key] = outcome
        self._num_bytes += _size(outcome)
        while len(self._outcomes) > _CACHED_MAX or self._num_bytes > _CACHED_BYTES_MAX:
            self._num_bytes -= _size(self._outcomes.popitem(last=False)[1])


def _size(outcome: Outcome) -> int:
    return len(outcome.grammar if isinstance(outcome, Built) else outcome.why)


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    """Failures of the child that are no grammar's fault become a status of the call."""
    try:
        yield
    except BuilderFailed as failed:
        raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, f"structure: {failed}", "structure") from failed
    except BuilderLost as lost:
        raise unavailable(str(lost)) from lost


def _choice(choice: pb.Choice) -> str:
    """As the child takes it. Raises RequestError."""
    if not choice.texts:
        raise invalid("structure.choice", "has no texts; send at least one")
    empty = next((i for i, text in enumerate(choice.texts) if not text), None)
    if empty is not None:
        raise invalid(f"structure.choice.texts[{empty}]", "is empty; each choice has at least one character")
    return json.dumps(list(choice.texts))


def _grammar(kind: str, outcome: Outcome) -> str:
    """Raises RequestError for one that cannot be used."""
    if isinstance(outcome, Built):
        return outcome.grammar
    raise invalid(f"structure.{kind}", f"cannot be used: {outcome.why}; {_REMEDIES[kind]}")
