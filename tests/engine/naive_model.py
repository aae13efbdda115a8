"""What the engine must do, in lists and dicts: slow, and simple enough to be believed.

The model does not say which plan comes next. It checks that a plan keeps the rules, has the fake model compute it, and
then knows exactly what clients must be told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from airside import _core
from tests.engine.columns import IMAGE, PlanRow, plan_rows, token_rows
from tests.engine.fake_model import Answer, FakeModel, extend, root

PATIENCE_S = 60.0


@dataclass
class NaiveImage:
    mark: int
    content: object
    """Equal for equal pictures."""
    expansion: list[int] | None = None
    shift: int = 0
    """How many positions fewer than tokens it takes."""
    ready: bool = False


@dataclass
class NaiveSequence:
    client: int
    seq_id: int
    marked: list[int]
    images: list[NaiveImage]
    order: tuple[int, float, float, int]
    """Among its user's newcomers: priority, when it is due, arrival, order of adding."""
    deadline: float | None
    max_tokens: int | None
    min_tokens: int
    stops: list[int]
    user: str = ""
    salt: str = ""
    structured: bool = False
    forced: list[int] = field(default_factory=list)
    atomic: bool = False
    """Whether image tokens of one picture that follow one another come in one step."""
    grammar_ready: bool = False
    was_scheduled: bool = False
    made: list[int] = field(default_factory=list)

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

    def splits_image(self, place: int) -> bool:
        """Whether a row that ends here leaves a part of a picture to another."""
        is_inside = any(begin < place < end for begin, end in self.image_spans())
        return self.atomic and self.shapes_known and is_inside and self.tokens()[place - 1 : place + 1] == [IMAGE] * 2

    def longest_whole_image(self) -> int:
        places = [place for place in range(len(self.tokens()) + 1) if self.splits_image(place)]
        return max((len(list(run)) + 1 for _, run in groupby(places, key=lambda at: at - places.index(at))), default=0)

    def position_shift(self, place: int) -> int:
        spans = zip(self.images, self.image_spans(), strict=True)
        return sum(image.shift for image, (_, end) in spans if end <= place)

    def hashes(self) -> list[int]:
        """What the KV of each known token must be."""
        tokens, spans = self.tokens(), self.image_spans()
        places: dict[int, tuple[object, int]] = {}
        for image, (begin, end) in zip(self.images, spans, strict=True):
            positions = [i for i in range(begin, end) if tokens[i] == IMAGE]
            places |= {i: (image.content, place) for place, i in enumerate(positions)}
        after, hashes = root(self.salt), []
        for i, token in enumerate(tokens):
            after = extend(after, token, places.get(i))
            hashes.append(after)
        return hashes

    def ready(self) -> int:
        """Known tokens before this may be computed."""
        if not self.shapes_known:
            return 0
        pending = [span[0] for image, span in zip(self.images, self.image_spans(), strict=True) if not image.ready]
        length = len(self.tokens())
        if self.structured and not self.grammar_ready:
            pending.append(next(at for at in range(length - 1, -1, -1) if not self.splits_image(at)))
        return min(pending, default=length)

    def banned(self, index: int) -> list[int]:
        return self.stops if index < self.min_tokens else []


@dataclass(frozen=True)
class End:
    """What a client is told of an end, but for the times."""

    seq_id: int
    reason: str
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int


@dataclass
class Flight:
    """A plan that was not applied yet."""

    plan: _core.StepPlan
    rows: list[tuple[PlanRow, NaiveSequence]]


class NaiveModel:
    """Follows one engine; every method asserts that the engine did what it should."""

    def __init__(self, config: _core.EngineConfig, engine: _core.Engine) -> None:
        self._config = config
        self._engine = engine
        self._capacity = min(config.max_model_len, config.num_blocks * config.block_size)
        self._workers = FakeModel(config.block_size)
        self._told: list[tuple[int, int, int]] = []  # client, sequence, token
        self._ends: list[tuple[int, End]] = []  # client, end
        self._running: set[int] | None = None  # before the latest plan; None: some of them were preempted
        self.flights: list[Flight] = []
        self.live: dict[int, NaiveSequence] = {}

    # --- what clients, pictures and grammars do ---

    def add(self, sequence: NaiveSequence) -> None:
        self.live[sequence.seq_id] = sequence
        self._workers.introduce(sequence.seq_id, sequence.salt, [image.content for image in sequence.images])

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

    def set_shape(self, seq_id: int, index: int, expansion: list[int], rope_advance: int) -> bool:
        sequence = self.live[seq_id]
        if sequence.images[index].expansion is not None:
            return False
        sequence.images[index].expansion = expansion
        sequence.images[index].shift = len(expansion) - (rope_advance or len(expansion))
        is_too_long = len(sequence.prompt()) >= self._capacity
        is_too_long |= sequence.longest_whole_image() > self._config.max_num_batched_tokens
        if sequence.shapes_known and is_too_long:
            self.end(sequence, "prompt_length_exceeded")
        return True

    def end(self, sequence: NaiveSequence, reason: str, completion_tokens: int | None = None) -> None:
        del self.live[sequence.seq_id]
        spans = sequence.image_spans() if sequence.shapes_known else []
        end = End(
            seq_id=sequence.seq_id,
            reason=reason,
            prompt_tokens=len(sequence.prompt()),
            image_tokens=sum(end - begin for begin, end in spans),
            completion_tokens=len(sequence.made) if completion_tokens is None else completion_tokens,
        )
        self._ends.append((sequence.client, end))

    def end_overdue(self, now: float) -> None:
        for sequence in list(self.live.values()):
            if sequence.deadline is not None and sequence.deadline <= now:
                self.end(sequence, "abort")

    # --- steps ---

    def schedule(self, now: float) -> _core.StepPlan | None:
        """The engine's next plan, if any; it is checked against the rules, and then in flight."""
        preemptions = self._engine.stats().num_preemptions
        self._running = {seq_id for seq_id in self.live if self._engine.status(seq_id) == "RUNNING"}
        plan = self._engine.schedule(now)
        if self._engine.stats().num_preemptions > preemptions:
            self._running = None
        if plan is not None:
            self._take_plan(plan)
        return plan

    def _take_plan(self, plan: _core.StepPlan) -> None:
        rows = [(row, self.live[row.seq_id]) for row in plan_rows(plan)]
        for row, sequence in rows:
            self._check_row(row, sequence)
        self._check_step(rows)
        self._check_order(rows)
        self._check_images(plan, rows)
        self.flights.append(Flight(plan, rows))
        assert len(self.flights) <= (2 if self._config.async_scheduling else 1)
        assert len(self.flights) == self._engine.steps_in_flight

    def _check_row(self, row: PlanRow, sequence: NaiveSequence) -> None:
        known = sequence.tokens()
        first_draft = row.end - len(row.drafts)
        pending = int(any(token < 0 for token in row.tokens))
        assert row.begin < first_draft <= sequence.ready() + pending
        assert not sequence.splits_image(first_draft), "a picture in two steps"
        assert (
            row.tokens[: len(known) - row.begin]
            == known[row.begin : first_draft] + row.drafts[: len(known) - first_draft]
        )
        assert all(token < 0 for token in row.tokens[len(known) - row.begin : first_draft - row.begin])
        assert (row.num_sampled > 0) == (first_draft == len(known) + pending)
        if pending:
            self._check_placeholder(row, row.tokens[first_draft - row.begin - 1])
        if row.num_sampled:
            first = len(sequence.made) + pending
            assert row.position == first
            assert row.structured == sequence.structured
            for i, banned in enumerate(row.banned):
                assert sorted(banned) == sorted(sequence.banned(first + i))
            assert row.forced == [
                sequence.forced[i] if i < len(sequence.forced) else -1 for i in range(first, first + row.num_sampled)
            ]
        assert len(row.blocks) == -(-row.end // self._config.block_size)
        assert row.position_shift == sequence.position_shift(row.begin)

    def _check_placeholder(self, row: PlanRow, token: int) -> None:
        before = {earlier.seq_id: earlier for earlier, _ in self.flights[-1].rows}[row.seq_id]
        assert before.num_sampled == 1
        assert token == -1 - before.first

    def _check_step(self, rows: list[tuple[PlanRow, NaiveSequence]]) -> None:
        config = self._config
        assert len(rows) <= config.max_num_seqs
        assert len({row.seq_id for row, _ in rows}) == len(rows)
        assert {block for row, _ in rows for block in row.blocks} <= set(range(config.num_blocks))
        written = [block for row, _ in rows for block in row.blocks[row.begin // config.block_size :]]
        assert len(set(written)) == len(written), "a block that two rows write to"
        if not config.enable_prefix_caching:
            blocks = [block for row, _ in rows for block in row.blocks]
            assert len(set(blocks)) == len(blocks)
        assert sum(len(row.tokens) for row, _ in rows) <= config.max_num_batched_tokens

        if self._running is None:
            return
        decodes = [self._is_decode(row, sequence) for row, sequence in rows]
        if config.prefill_first:
            assert len(set(decodes)) == 1
        elif config.enable_chunked_prefill and not config.atomic_images:
            assert decodes == sorted(decodes, reverse=True), "a prompt before a decode"

    def _is_decode(self, row: PlanRow, sequence: NaiveSequence) -> bool:
        if row.seq_id not in (self._running or ()):
            return False
        computes_pending = any(token < 0 for token in row.tokens)
        return (
            bool(sequence.made or computes_pending) and len(row.tokens) == 1 + len(row.drafts) and row.num_sampled > 0
        )

    def _check_order(self, rows: list[tuple[PlanRow, NaiveSequence]]) -> None:
        """Nobody is admitted for the first time past one of the same user who could move, or who ran before."""
        fresh = [sequence for _, sequence in rows if not sequence.was_scheduled]
        for sequence in fresh:
            sequence.was_scheduled = True
        by_user: dict[str, list[NaiveSequence]] = {}
        for sequence in fresh:
            by_user.setdefault(sequence.user, []).append(sequence)
        for user, admitted in by_user.items():
            orders = [sequence.order for sequence in admitted]
            assert orders == sorted(orders), "admitted out of order"
            for waiting in self._waiting():
                if waiting.user == user and not waiting.was_scheduled:
                    assert waiting.order > orders[-1], "overtaken"
        priorities = [sequence.order[0] for sequence in fresh]
        assert priorities == sorted(priorities)
        for waiting in self._waiting():
            if priorities:
                assert waiting.order[0] >= priorities[-1], "overtaken by a lower priority"

    def _waiting(self) -> list[NaiveSequence]:
        """Those that were never admitted and could be, or, under strict order, hold up who is behind them."""
        return [
            sequence
            for sequence in self.live.values()
            if not sequence.was_scheduled and (self._config.strict_fifo or sequence.ready() > 0)
        ]

    def _check_images(self, plan: _core.StepPlan, rows: list[tuple[PlanRow, NaiveSequence]]) -> None:
        needed: list[tuple[int, int, int]] = []  # sequence, image, embedding: one per image token of the step
        for row, sequence in rows:
            for index, (begin, end) in enumerate(sequence.image_spans()):
                positions = [i for i in range(begin, end) if sequence.tokens()[i] == IMAGE]
                needed += [(row.seq_id, index, n) for n, i in enumerate(positions) if row.begin <= i < row.end]
        assert needed == [(s, i, n) for s, i, start, count in plan.images for n in range(start, start + count)]
        assert sum(row.tokens.count(IMAGE) for row, _ in rows) == len(needed)

    def compute(self) -> Answer:
        """What the workers answer to the first step in flight."""
        flight = self.flights[0]
        known = {row.seq_id: seq.hashes() for row, seq in flight.rows if self.live.get(row.seq_id) is seq}
        return self._workers.execute(flight.plan, known)

    def take_answer(self, answer: Answer) -> None:
        """The first step in flight is closed with these tokens."""
        flight = self.flights.pop(0)
        for row, sequence in flight.rows:
            tokens = answer.sampled[row.first : row.first + row.num_sampled]
            for i, token in enumerate(tokens):
                if self.live.get(row.seq_id) is not sequence or (i and tokens[i - 1] != row.drafts[i - 1]):
                    break
                self._take_token(sequence, token)

    def _take_token(self, sequence: NaiveSequence, token: int) -> None:
        may_stop = len(sequence.made) >= sequence.min_tokens
        sequence.made.append(token)
        self._told.append((sequence.client, sequence.seq_id, token))
        room = self._capacity - len(sequence.prompt())
        if may_stop and token in sequence.stops:
            self.end(sequence, "stop")
        elif len(sequence.made) == min(room, sequence.max_tokens or room):
            self.end(sequence, "length")
        elif len(sequence.made) == len(sequence.forced):
            self.end(sequence, "stop")

    def lose_kv(self) -> None:
        self._workers.restart()
        self.flights.clear()
        for sequence in self.live.values():
            sequence.grammar_ready = False

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
        for _, end in ends:
            if end.reason == "insufficient_system_resource":
                assert self._config.preemption == "stop"
                assert self.live[end.seq_id].was_scheduled
                self.end(self.live[end.seq_id], end.reason)


def _as_end(finish: _core.Finish) -> End:
    assert finish.detail
    durations = (finish.queued_s, finish.time_to_first_token_s, finish.decode_s, finish.prefill_s, finish.preempted_s)
    assert min(*durations, finish.vision_wait_s) >= 0
    assert 0 <= finish.accepted_tokens <= finish.draft_tokens
    assert 0 <= finish.cached_tokens < max(finish.prompt_tokens, 1)
    return End(
        seq_id=finish.seq_id,
        reason=finish.reason,
        prompt_tokens=finish.prompt_tokens,
        image_tokens=finish.image_tokens,
        completion_tokens=finish.completion_tokens,
    )
