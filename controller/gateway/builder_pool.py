"""The children that build grammars: as many as grammars are slow, one when nothing is asked."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from airside.controller.gateway.builder_process import BuilderLost, BuilderProcess, Vocabulary
from airside.controller.gateway.text_model import TextModel

log = logging.getLogger(__name__)

BUILDERS_MAX = 3
"""Children at work at once; as many threads may use the pool."""

_IDLE_MAX = 1  # each holds a vocabulary
_PATIENCE_S = 0.25  # a grammar that takes longer is slow, and the next one gets a child of its own
_GRAMMARS_MAX = 256  # then a fresh child takes its place, so that none grows without end


class BuilderPool:
    """Children, started when they are needed.

    Args:
        model: whose vocabulary the grammars are for.
        max_model_len: its context, in tokens.
        timeout_s: for each grammar.
    """

    def __init__(self, model: TextModel, max_model_len: int, timeout_s: float) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._starting = threading.Lock()  # held while a child starts: two would take twice as long
        self._changed = threading.Condition()  # of what follows
        self._live: set[BuilderProcess] = set()
        self._idle: list[BuilderProcess] = []  # a part of those
        self._closed = False

    @contextlib.contextmanager
    def builder(self) -> Iterator[BuilderProcess]:
        """A child for one grammar. Raises BuilderFailed when none can be had, BuilderLost when the pool is closed."""
        builder = self._take()
        try:
            yield builder
        finally:
            self._give_back(builder)

    def close(self) -> None:
        """Ends all children."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._live -= {*idle}
            busy = list(self._live)
            self._changed.notify_all()
        for builder in idle:
            builder.close()
        for builder in busy:
            builder.kill()  # whoever uses it closes it

    def _take(self) -> BuilderProcess:
        builder = self._idle_one(_PATIENCE_S)
        if builder is not None:
            return builder
        with self._starting:
            return self._idle_one(0.0) or self._start()

    def _idle_one(self, patience_s: float) -> BuilderProcess | None:
        with self._changed:
            if not self._idle and self._live:
                self._changed.wait_for(lambda: self._idle or self._closed, patience_s)
            self._refuse_if_closed()
            while self._idle:
                builder = self._idle.pop()
                if builder.alive:
                    return builder
                self._drop(builder)
            return None

    def _start(self) -> BuilderProcess:
        model = self._model
        vocabulary = Vocabulary(
            tokenizer=model.tokenizer_json(),
            vocab_size=max(model.vocab_size, model.num_token_ids),
            end_ids=tuple(model.end_ids),
            chars_max=self._max_model_len * model.token_chars_max,
        )
        builder = BuilderProcess(vocabulary, self._timeout_s)
        with self._changed:
            self._live.add(builder)  # before it is ready: `close` must find it
        try:
            self._refuse_if_closed()
            builder.await_ready()
        except BaseException:
            self._drop(builder)
            self._refuse_if_closed()
            raise
        log.info("grammar_builder_started live=%d", len(self._live))
        return builder

    def _drop(self, builder: BuilderProcess) -> None:
        with self._changed:
            self._live.discard(builder)
        builder.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BuilderLost("the server is stopping")

    def _give_back(self, builder: BuilderProcess) -> None:
        with self._changed:
            usable = builder.alive and builder.num_built < _GRAMMARS_MAX
            keep = usable and not self._closed and len(self._idle) < _IDLE_MAX
            if keep:
                self._idle.append(builder)
                self._changed.notify()
        if not keep:
            self._drop(builder)
        self._refuse_if_closed()
