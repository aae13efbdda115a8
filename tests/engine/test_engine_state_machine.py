"""The engine and a naive model, side by side through whatever can happen."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from airside import _core
from tests.engine.columns import IMAGE, i32, ints, request
from tests.engine.naive_model import PATIENCE_S, NaiveImage, NaiveModel, NaiveSequence

CONFIGS = st.builds(
    _core.EngineConfig,
    num_blocks=st.integers(3, 14),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(1, 12),
    max_num_mixed_tokens=st.integers(0, 6),
    max_model_len=st.integers(2, 40),
    enable_chunked_prefill=st.booleans(),
    prefill_first=st.booleans(),
    strict_fifo=st.booleans(),
    preemption=st.sampled_from(["recompute", "stop"]),
    image_token_id=st.just(IMAGE),
    atomic_images=st.booleans(),
    max_queued_requests=st.integers(1, 6),
    max_queued_tokens=st.integers(4, 60),
    vocab_size=st.sampled_from([None, 31, 30]),
    victim_rule=st.sampled_from(["least_waste", "most_output", "last"]),
    enable_prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
    draft_method=st.sampled_from(["none", "ngram", "mtp"]),
    max_draft_tokens=st.integers(1, 3),
    num_state_slots=st.sampled_from([0, 0, 1, 3]),
    tail_tokens=st.integers(0, 2),
)
TOKENS = st.integers(20, 30)
"""Ids that no fake model makes; the last is outside the smallest vocabulary."""

PROMPTS = st.one_of(
    st.lists(st.one_of(TOKENS, TOKENS, TOKENS, st.just(IMAGE)), min_size=1, max_size=14),
    st.integers(1, 12).map(lambda length: [20, 21, 22, 20, 21, 23, 20, 21, 22, 24, 24, 25][:length]),
)
"""Many begin alike."""

EXPANSIONS = st.lists(st.sampled_from([IMAGE, IMAGE, 8]), min_size=1, max_size=6)


class EngineAndModel(RuleBasedStateMachine):
    """Rules are events; after each, the engine's own check runs and outputs are compared."""

    @initialize(config=CONFIGS, expansion=EXPANSIONS, rope_advance=st.sampled_from([0, 0, 1, 2]))
    def start(self, config: _core.EngineConfig, expansion: list[int], rope_advance: int) -> None:
        self.config = config
        self.expansion = expansion  # of the one picture that there is
        self.rope_advance = min(rope_advance, len(expansion)) if IMAGE in expansion else 0
        self.engine = _core.Engine(config)
        self.model = NaiveModel(config, self.engine)
        self.now = 100.0
        self.num_added = 0

    def some(self, data: st.DataObject) -> NaiveSequence:
        return self.model.live[data.draw(st.sampled_from(sorted(self.model.live)), label="sequence")]

    @rule(
        tokens=PROMPTS,
        client=st.integers(0, 1),
        user=st.sampled_from(["", "", "ann"]),
        salt=st.sampled_from(["", "", "salt"]),
        priority=st.sampled_from([0, 0, 0, -1]),
        patience=st.sampled_from([None, None, None, 2.0, 8.0]),
        age=st.sampled_from([0.0, 0.0, 1.0]),
        max_tokens=st.one_of(st.none(), st.integers(1, 8)),
        min_tokens=st.sampled_from([0, 0, 2]),
        stops=st.lists(st.integers(0, 11), max_size=2, unique=True),
        kind=st.sampled_from(["plain", "plain", "plain", "structured", "forced", "same id"]),
    )
    def add(
        self,
        tokens: list[int],
        client: int,
        user: str,
        salt: str,
        priority: int,
        patience: float | None,
        age: float,
        max_tokens: int | None,
        min_tokens: int,
        stops: list[int],
        kind: str,
    ) -> None:
        seq_id = self.num_added - 1 if kind == "same id" and self.num_added else self.num_added
        arrival = self.now - age
        deadline = None if patience is None else self.now + patience
        due = arrival + PATIENCE_S if deadline is None else min(deadline, arrival + PATIENCE_S)
        marks = [i for i, token in enumerate(tokens) if token == IMAGE]
        forced = [20, 21, 22, 23] if kind == "forced" else []
        sequence = NaiveSequence(
            client=client,
            seq_id=seq_id,
            marked=tokens,
            # All pictures have the same content, so that they can be shared.
            images=[NaiveImage(mark, b"a" * 16) for mark in marks],
            order=(priority, due, arrival, self.num_added),
            deadline=deadline,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stops=stops,
            user=user,
            salt=salt,
            structured=kind == "structured",
            forced=forced,
            atomic=self.config.atomic_images,
        )
        asked = request(
            seq_id,
            tokens,
            client=client,
            image_positions=marks,
            image_hashes=[b"a" * 16] * len(marks),
            arrival=arrival,
            priority=priority,
            deadline=deadline,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            user=user,
            cache_salt=salt,
            structured=kind == "structured",
            golden_tokens=i32(forced),
            golden_mode="force" if forced else "",
        )
        expected = self.model.expected_rejection(sequence)
        rejection = self.engine.add(asked, self.now)
        assert (rejection.code if rejection else None) == expected
        if rejection is None:
            self.model.add(sequence)
            self.num_added += 1

    @precondition(lambda self: any(sequence.images for sequence in self.model.live.values()))
    @rule(data=st.data())
    def shape(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        if sequence.images:
            self.set_shape(sequence.seq_id, data.draw(st.integers(0, len(sequence.images) - 1)))

    def set_shape(self, seq_id: int, index: int) -> None:
        done = self.engine.set_shape(seq_id, index, i32(self.expansion), rope_advance=self.rope_advance)
        assert done == self.model.set_shape(seq_id, index, self.expansion, self.rope_advance)

    @precondition(lambda self: any(sequence.images for sequence in self.model.live.values()))
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        shaped = [i for i, image in enumerate(sequence.images) if image.expansion is not None]
        if shaped:
            image = sequence.images[index := data.draw(st.sampled_from(shaped))]
            assert self.engine.set_ready(sequence.seq_id, index) == (not image.ready)
            image.ready = True

    @precondition(lambda self: any(sequence.structured for sequence in self.model.live.values()))
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def grammar(self, data: st.DataObject, fails: bool) -> None:
        sequence = self.some(data)
        assert sequence.structured == (sequence.seq_id in self.engine.structured_ids())
        if sequence.structured and fails:
            assert self.engine.fail_grammar(sequence.seq_id, "no such rule")
            self.model.end(sequence, "structured_output_failed")
        elif sequence.structured:
            assert ints(self.engine.output_ids(sequence.seq_id)) == sequence.made
            assert self.engine.set_grammar_ready(sequence.seq_id) == (not sequence.grammar_ready)
            sequence.grammar_ready = True

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), how=st.sampled_from(["nothing", "nothing", "abort", "vision_failed", "stop"]))
    def end(self, data: st.DataObject, how: str) -> None:
        sequence = self.some(data)
        if how == "nothing":
            return
        if how == "stop":
            num_tokens = data.draw(st.integers(0, len(sequence.made)))
            if self.engine.stop(sequence.seq_id, num_tokens, "a stop string"):
                self.model.end(sequence, "stop", num_tokens)
            return
        end = self.engine.fail_vision if how == "vision_failed" else self.engine.abort
        assert end(sequence.seq_id, "because")
        assert not end(sequence.seq_id, "because")
        self.model.end(sequence, how)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def schedule(self) -> None:
        self.model.end_overdue(self.now)
        plan = self.model.schedule(self.now)
        assert plan is not None or self.model.flights or not self.engine.has_work

    @precondition(lambda self: self.model.flights)
    @rule()
    def apply(self) -> None:
        answer = self.model.compute()
        answer.apply_to(self.engine, self.now)
        self.model.take_answer(answer)

    @rule()
    def everything_arrives(self) -> None:
        """Pixels of all pictures whose shape is known, and all grammars."""
        for sequence in self.model.live.values():
            for index, image in enumerate(sequence.images):
                if image.expansion is not None and not image.ready:
                    assert self.engine.set_ready(sequence.seq_id, index)
                    image.ready = True
            sequence.grammar_ready |= self.engine.set_grammar_ready(sequence.seq_id)

    @rule(steps=st.integers(1, 12), ahead=st.booleans())
    def several_steps(self, steps: int, ahead: bool) -> None:
        for _ in range(steps):
            for _ in range(1 + ahead):
                self.schedule()
                self.look()
            if not self.model.flights:
                return
            self.apply()
            self.look()

    @rule(happens=st.sampled_from([False, True]))
    def fail_step(self, happens: bool) -> None:
        if not happens:
            return
        self.engine.fail_step(self.now)
        self.model.lose_kv()
        self.model.end_overdue(self.now)
        assert self.engine.stats().blocks_live == 0

    @invariant()
    def look(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        self.model.check_outputs()
        stats = self.engine.stats()
        assert stats.num_waiting + stats.num_running == len(self.model.live)
        assert stats.blocks_free + stats.blocks_live == self.config.num_blocks
        assert stats.blocks_cached <= stats.blocks_free

    def teardown(self) -> None:
        """All pictures come and all grammars are built, and then everything must end."""
        if not hasattr(self, "engine"):
            return
        for sequence in list(self.model.live.values()):
            for index in range(len(sequence.images)):
                if sequence.seq_id not in self.model.live:
                    break
                self.set_shape(sequence.seq_id, index)
        self.everything_arrives()
        for _ in range(2000):
            self.schedule()
            self.look()
            if self.model.flights:
                self.apply()
                self.look()
            if not self.model.live and not self.model.flights:
                break
        assert not self.model.live, "some sequence never ends"
        assert self.engine.stats().blocks_live == 0
        assert self.engine.stats().state_slots_live == 0


TestEngineAndModel = EngineAndModel.TestCase
TestEngineAndModel.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
