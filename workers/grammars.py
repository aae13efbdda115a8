"""The grammars of structured sequences: which token ids each may take next. They live on rank 0 alone."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from airside.proto.messages import GrammarFailed, GrammarReady
from airside.workers.grammar import Grammar, GrammarError
from airside.workers.grammar_tokenizer import load_grammar_tokenizer
from airside.workers.model_config import ModelConfig

_NUM_THREADS = 2  # so that a slow build does not hold up the next
_STACK_BYTES = 16 * 1024 * 1024  # deep grammars recurse; the gateway has tried them with a quarter of this


@dataclass(frozen=True, slots=True)
class _Job:
    """A grammar to build. `ticket` tells it from another of the same sequence."""

    seq_id: int
    ticket: int
    serialized: str
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of a job: a grammar, or why there is none."""

    job: _Job
    built: Grammar | str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of masks for a sequence: the first for output position `position`, one more behind each draft."""

    seq_id: int
    position: int
    drafts: Sequence[int] = ()


class Grammars:
    """Compiled grammars by sequence.

    `open` returns at once; threads build, and `poll` then has the answer for the controller. `wake_fd` can be read from
    when a build is done, so that a loop can wait for it beside its socket.

    For each step of a structured sequence the sampler calls `masks`, then `apply_masks` on the logits, and `advance`
    with the tokens that count. All of it runs in the loop's thread.

    Args:
        model_path: a checkpoint folder or a .gguf file; its tokenizer is read with the first grammar.
        config: of the same checkpoint.
    """

    def __init__(self, model_path: str, config: ModelConfig) -> None:
        self._path = Path(model_path)
        self._config = config
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._grammars: dict[int, Grammar] = {}
        self._tickets: dict[int, int] = {}  # of the sequences that are being built, their latest job
        self._executor: LLExecutor | None = None  # has threads, and most ranks have no grammars
        self._num_opened = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._failed: dict[int, str] = {}  # sequences whose grammar cannot go on, and why
        self._outcomes: list[_Outcome] = []
        self._outcomes_lock = threading.Lock()  # of the outcomes, and of the descriptor that says whether there are any
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Can be read from when a build is done, until `poll`."""

    def open(self, seq_id: int, grammar: str, output_ids: bytes) -> None:
        """Starts to build; an earlier grammar of this sequence is replaced. `output_ids`: i32, what it has made."""
        if self._num_opened == 0:
            self._start_threads()
        self._num_opened += 1
        self._grammars.pop(seq_id, None)
        self._tickets[seq_id] = self._num_opened
        self._jobs.put(_Job(seq_id, self._num_opened, grammar, np.frombuffer(output_ids, "<i4").tolist()))

    def poll(self) -> list[GrammarReady | GrammarFailed]:
        """Answers since the last call, for the controller: of builds, and of grammars that failed later."""
        answers: list[GrammarReady | GrammarFailed] = [GrammarFailed(*failure) for failure in self._failed.items()]
        self._failed.clear()
        if self._outcomes:
            with self._outcomes_lock:
                outcomes, self._outcomes = self._outcomes, []
                os.eventfd_read(self.wake_fd)
            answers += [self._answer(outcome) for outcome in outcomes if self._is_wanted(outcome.job)]
        return answers

    def close(self, seq_id: int) -> None:
        """Forgets the sequence; harmless when it is not known."""
        self._grammars.pop(seq_id, None)
        self._tickets.pop(seq_id, None)

    def masks(self, wanted: Sequence[Wanted]) -> Tensor:
        """uint8 [sum of 1 + len(drafts), mask_bytes]: bit i of byte b says whether token `8 * b + i` may come.

        Row j of a sequence is for output position `position + j`, the drafts before it taken as accepted. A row that
        cannot count, since a draft before it is refused or ends the text or since the sequence has ended already,
        allows all. A row 0 without any bit: the grammar is stuck or has failed; after `advance`, `poll` says why.

        The sequences are distinct. Their rows are computed beside one another, without Python.
        """
        begins = np.cumsum([0, *(1 + len(want.drafts) for want in wanted)]).tolist()
        grammars = [self._grammars[want.seq_id] for want in wanted]
        rows = np.full((begins[-1], grammars[0].mask_bytes), 0xFF, np.uint8)
        walks = [
            (grammar.masks(want.position, want.drafts, rows[begin:end]), begin)
            for grammar, want, begin, end in zip(grammars, wanted, begins, begins[1:], strict=False)
        ]
        while walks:
            asked = [(walk, begin, next(walk, None)) for walk, begin in walks]
            walks = [(walk, begin) for walk, begin, ask in asked if ask is not None]
            self._fill(rows, [(ask[0], begin + ask[1]) for _, begin, ask in asked if ask is not None])
        return torch.from_numpy(rows)

    def advance(self, seq_id: int, position: int, tokens: Sequence[int]) -> None:
        """Takes in the tokens that count, the first of which is at output position `position`.

        Negative ones (nothing could be sampled) end the sequence here; so does an end token.

        A grammar that has failed is not answered for before nothing can be sampled: tokens that it allowed count.
        """
        grammar = self._grammars[seq_id]
        grammar.advance(position, tokens)
        if grammar.why_failed is not None and tokens[0] < 0:
            self._failed[seq_id] = grammar.why_failed

    def _fill(self, rows: NDArray[np.uint8], asks: list[tuple[LLMatcher, int]]) -> None:
        """Each matcher says what may come next, in the row of that index."""
        if not asks:
            return
        if self._executor is None:
            self._executor = LLExecutor(torch.get_num_threads())
        self._executor.unsafe_compute_mask_ptr(asks, rows.ctypes.data, rows.shape[1], len(rows))

    def _answer(self, outcome: _Outcome) -> GrammarReady | GrammarFailed:
        seq_id = outcome.job.seq_id
        del self._tickets[seq_id]
        if isinstance(outcome.built, str):
            return GrammarFailed(seq_id, outcome.built)
        self._grammars[seq_id] = outcome.built
        return GrammarReady(seq_id)

    def _is_wanted(self, job: _Job) -> bool:
        return self._tickets.get(job.seq_id) == job.ticket

    def _start_threads(self) -> None:
        """Daemons: a build in hand is not waited for when the process ends."""
        before = threading.stack_size(_STACK_BYTES)
        for number in range(_NUM_THREADS):
            threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True).start()
        threading.stack_size(before)

    def _work(self) -> None:
        while True:
            self._do(self._jobs.get())  # a function of its own, so that a thread that waits holds no grammar

    def _do(self, job: _Job) -> None:
        if self._is_wanted(job):
            outcome = _Outcome(job, self._build(job))
            with self._outcomes_lock:
                self._outcomes.append(outcome)
                os.eventfd_write(self.wake_fd, 1)

    def _build(self, job: _Job) -> Grammar | str:
        try:
            with self._tokenizer_lock:
                if self._tokenizer is None:
                    self._tokenizer = load_grammar_tokenizer(self._path, self._config)
        except Exception as error:
            # The libraries raise whatever their parsers raise. Only structured sequences are the worse for it.
            return f"llguidance cannot use this checkpoint's tokenizer: {type(error).__name__}: {error}"
        try:
            return Grammar(self._tokenizer, job.serialized, job.output_ids)
        except GrammarError as error:
            return str(error)
        except BaseException as error:
            # A panic of llguidance's is no Exception; unanswered, the sequence would wait for ever.
            return f"llguidance failed: {type(error).__name__}: {error}"


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Sets the logits of refused tokens to -inf, in place.

    Args:
        logits: [num_positions, vocab] float32.
        rows: int64 [n], distinct: the position that each mask is for.
        masks: uint8 [n, mask_bytes], as from `Grammars.masks`.
    """
    addends = functional.embedding(masks.to(logits.device).int(), _addends(logits.device))  # [n, mask_bytes, 8]
    logits.index_add_(0, rows, addends.flatten(1)[:, : logits.shape[1]])


@functools.cache
def _addends(device: torch.device) -> Tensor:
    """[256, 8] float32: what a byte of a mask adds to the logits of its eight tokens."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits.bool(), 0.0, float("-inf")).to(device)
