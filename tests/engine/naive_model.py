"""What the engine must do, in lists and dicts: slow, and simple enough to be believed.

The model does not say which plan comes next. It checks that a plan keeps the rules, computes it on a KV pool that
remembers whose token lies where, and then knows exactly what clients must be told.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from airside import _core
from tests.engine.columns import IMAGE, PlanRow, i32, plan_rows, token_rows

VOCABULARY = 12
"""Small, so that stop tokens and the image token come up often."""


def next_token(tokens: list[int], banned: list[int]) -> int:
    """The fake model: a function of all tokens so far, so that a recompute must make the same one."""
    token = zlib.crc32(i32(tokens)) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


@dataclass
class NaiveImage:
    mark: int
    expansion: list[int] | None = None
    ready: bool = False


@dataclass
class NaiveSequence:
    client: int
    seq_id: int
    marked: list[int]
    images: list[NaiveImage]
    order: tuple[int, float, float, int]
    deadline: float | None
    max_tokens: int | None
    min_tokens: int
    stops: list[int]
    made: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def shapes_known(self) -> bool:
        return all(image.expansion is not None for image in self.images)

    def prompt(self) -> list[int]:
        if not self.shapes_known:
            return self.marked
        expansions = {image.mark: image.expansion for image in self.images}
        return [part for i, token in enumerate(self.marked) for part in expansions.get(i) or [token]]

    def tokens(self) -> list[int]:
        return self.prompt() + self.made

    def image_spans(self) -> list[tuple[int, int]]:
        spans, grown = [], 0
        for image in self.images:
            length = len(image.expansion or [])
            spans.append((image.mark + grown, image.mark + grown + length))
            grown += length - 1
        return spans

    def ready(self) -> int:
        if not self.shapes_known:
            return 0
        pending = [span[0] for image, span in zip(self.images, self.image_spans(), strict=True) if not image.ready]
        return min(pending, default=len(self.tokens()))

    def banned(self) -> list[int]:
        return (self.stops if len(self.made) < self.min_tokens else []) + [IMAGE]


@dataclass(frozen=True)
class End:
    """What a client is told of an end, but for the times."""

    seq_id: int
    reason: str
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int


class NaiveModel:
    """Follows one engine; every method asserts that the engine did what it should."""

    def __init__(self, config: _core.EngineConfig, engine: _core.Engine) -> None:
        self._config = config
        self._engine = engine
        self._capacity = min(config.max_model_len, config.num_blocks * config.block_size)
        self._kv: dict[tuple[int, int], tuple[NaiveSequence, int]] = {}
        self._flying: list[tuple[PlanRow, NaiveSequence]] = []
        self._told: list[tuple[int, int, int]] = []  # client, sequence, token
        self._ends: list[tuple[int, End]] = []  # client, end
        self.live: dict[int, NaiveSequence] = {}

    # --- what clients and pictures do ---

    def expected_rejection(self, sequence: NaiveSequence) -> str | None:
        """The code that `add` must give."""
        waiting = [other for other in self.live.values() if self._engine.status(other.seq_id) == "WAITING"]
        queued_tokens = sum(len(other.tokens()) for other in waiting)
        if sequence.seq_id in self.live:
            return "duplicate_id"
        size = self._config.vocab_size
        if size is not None and not all(0 <= token < size for token in sequence.marked + sequence.stops):
            return "invalid"
        if len(sequence.marked) > self._config.max_model_len - 1:
            return "context_exceeded"
        if len(sequence.marked) + 1 > self._config.num_blocks * self._config.block_size:
            return "pool_exceeded"
        if len(waiting) >= self._config.max_queued_requests:
            return "queue_full"
        if waiting and queued_tokens + len(sequence.marked) > self._config.max_queued_tokens:
            return "queue_full"
        return None

    def set_shape(self, seq_id: int, index: int, expansion: list[int]) -> bool:
        sequence = self.live[seq_id]
        if sequence.images[index].expansion is not None:
            return False
        sequence.images[index].expansion = expansion
        if sequence.shapes_known and len(sequence.prompt()) >= self._capacity:
            self.end(sequence, "prompt_length_exceeded")
        return True

    def end(self, sequence: NaiveSequence, reason: str) -> None:
        del self.live[sequence.seq_id]
        spans = sequence.image_spans() if sequence.shapes_known else []
        end = End(
            seq_id=sequence.seq_id,
            reason=reason,
            prompt_tokens=len(sequence.prompt()),
            image_tokens=sum(end - begin for begin, end in spans),
            completion_tokens=len(sequence.made),
        )
        self._ends.append((sequence.client, end))

    def end_overdue(self, now: float) -> None:
        for sequence in list(self.live.values()):
            if sequence.deadline is not None and sequence.deadline <= now:
                self.end(sequence, "abort")

    # --- steps ---

    def take_plan(self, plan: _core.StepPlan) -> None:
        """Checks a plan against the rules; it is then in flight."""
        rows = [(row, self.live[row.seq_id]) for row in plan_rows(plan)]
        for row, sequence in rows:
            self._check_row(row, sequence)
        self._check_step(rows)
        self._check_images(plan, rows)
        self._flying = rows

    def _check_row(self, row: PlanRow, sequence: NaiveSequence) -> None:
        # Whoever was preempted starts from nothing; nobody loses a part.
        assert row.begin in (0, sequence.num_computed)
        sequence.num_computed = row.begin
        assert row.begin < row.end <= sequence.ready()
        assert row.tokens == sequence.tokens()[row.begin : row.end]
        assert row.sampled == (row.end == len(sequence.tokens()))
        if row.sampled:
            assert row.position == len(sequence.made)
            assert sorted(row.banned) == sorted(sequence.banned())
        assert len(row.blocks) == -(-row.end // self._config.block_size)
        for position in range(row.begin):
            assert self._kv.get(self._slot(row, position)) == (sequence, position), "its KV is not where it was"

    def _check_step(self, rows: list[tuple[PlanRow, NaiveSequence]]) -> None:
        config = self._config
        assert len(rows) <= config.max_num_seqs
        assert len({row.seq_id for row, _ in rows}) == len(rows)
        blocks = [block for row, _ in rows for block in row.blocks]
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= set(range(config.num_blocks))
        assert sum(len(row.tokens) for row, _ in rows) <= config.max_num_batched_tokens

        decodes = [bool(sequence.made) and row.begin == len(sequence.tokens()) - 1 for row, sequence in rows]
        if config.prefill_first:
            assert len(set(decodes)) == 1
        elif config.enable_chunked_prefill:
            assert decodes == sorted(decodes, reverse=True), "a prompt before a decode"
        fresh = [sequence.order for row, sequence in rows if row.begin == 0]
        assert fresh == sorted(fresh), "admitted out of order"
        if not config.enable_chunked_prefill:
            for row, sequence in rows:
                assert row.end == sequence.ready() or len(row.tokens) == config.max_num_batched_tokens
        self._check_overtaking(fresh)

    def _check_overtaking(self, fresh: list[tuple[int, float, float, int]]) -> None:
        """Nobody is admitted past somebody who could move, or, under strict order, past anybody."""
        last = max(fresh, default=None)
        for sequence in self.live.values():
            waits = self._engine.status(sequence.seq_id) == "WAITING"
            may_move = self._config.strict_fifo or sequence.num_computed < sequence.ready()
            if last is not None and waits and may_move:
                assert sequence.order > last

    def _check_images(self, plan: _core.StepPlan, rows: list[tuple[PlanRow, NaiveSequence]]) -> None:
        needed: list[tuple[int, int, int]] = []  # sequence, image, embedding: one per image token of the step
        for row, sequence in rows:
            for index, (begin, end) in enumerate(sequence.image_spans()):
                positions = [i for i in range(begin, end) if sequence.tokens()[i] == IMAGE]
                needed += [(row.seq_id, index, n) for n, i in enumerate(positions) if row.begin <= i < row.end]
        assert needed == [(s, i, n) for s, i, start, count in plan.images for n in range(start, start + count)]
        assert sum(row.tokens.count(IMAGE) for row, _ in rows) == len(needed)

    def _slot(self, row: PlanRow, position: int) -> tuple[int, int]:
        return row.blocks[position // self._config.block_size], position % self._config.block_size

    def compute(self) -> list[int]:
        """What the workers answer to the step in flight: one token per sampled row."""
        for row, sequence in self._flying:
            for position in range(row.begin, row.end):
                self._kv[self._slot(row, position)] = (sequence, position)
        return [next_token(sequence.tokens(), row.banned) for row, sequence in self._flying if row.sampled]

    def take_tokens(self, sampled: list[int]) -> None:
        """The step is closed with these tokens."""
        left = iter(sampled)
        for row, sequence in self._flying:
            token = next(left) if row.sampled else None
            if self.live.get(row.seq_id) is not sequence:
                continue
            sequence.num_computed = row.end
            if token is not None:
                self._take_token(sequence, token)
        self._flying = []

    def _take_token(self, sequence: NaiveSequence, token: int) -> None:
        may_stop = len(sequence.made) >= sequence.min_tokens
        sequence.made.append(token)
        self._told.append((sequence.client, sequence.seq_id, token))
        room = self._capacity - len(sequence.prompt())
        if may_stop and token in sequence.stops:
            self.end(sequence, "stop")
        elif len(sequence.made) == min(room, sequence.max_tokens or room):
            self.end(sequence, "length")

    def lose_kv(self) -> None:
        self._kv.clear()
        self._flying = []
        for sequence in self.live.values():
            sequence.num_computed = 0

    # --- what clients are told ---

    def check_outputs(self) -> None:
        told: list[tuple[int, int, int]] = []
        ends: list[tuple[int, End]] = []
        for output in self._engine.take_outputs():
            told += [(output.client, seq_id, token) for seq_id, tokens in token_rows(output) for token in tokens]
            ends += [(output.client, _as_end(finish)) for finish in output.finished]
        self._foresee_preempted(ends)
        assert sorted(told, key=lambda row: row[0]) == told, "clients out of order"
        assert told == sorted(self._told, key=lambda row: row[0])
        assert sorted(ends, key=repr) == sorted(self._ends, key=repr)
        self._told, self._ends = [], []

    def _foresee_preempted(self, ends: list[tuple[int, End]]) -> None:
        """Whom the engine stops for want of blocks is its own affair, as far as it may."""
        flying = {row.seq_id for row, _ in self._flying}
        for _, end in ends:
            if end.reason == "insufficient_system_resource":
                assert self._config.preemption == "stop"
                assert self.live[end.seq_id].num_computed > 0
                assert end.seq_id not in flying
                self.end(self.live[end.seq_id], end.reason)


def _as_end(finish: _core.Finish) -> End:
    assert finish.detail
    assert min(finish.queued_s, finish.time_to_first_token_s, finish.decode_s) >= 0
    return End(
        seq_id=finish.seq_id,
        reason=finish.reason,
        prompt_tokens=finish.prompt_tokens,
        image_tokens=finish.image_tokens,
        completion_tokens=finish.completion_tokens,
    )
