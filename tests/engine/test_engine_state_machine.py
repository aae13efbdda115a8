"""The engine and a naive model, side by side through whatever can happen."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from airside import _core
from tests.engine.columns import IMAGE, i32, request
from tests.engine.naive_model import NaiveImage, NaiveModel, NaiveSequence

CONFIGS = st.builds(
    _core.EngineConfig,
    num_blocks=st.integers(1, 10),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(1, 12),
    max_model_len=st.integers(2, 24),
    enable_chunked_prefill=st.booleans(),
    prefill_first=st.booleans(),
    strict_fifo=st.booleans(),
    preemption=st.sampled_from(["recompute", "stop"]),
    image_token_id=st.just(IMAGE),
    max_queued_requests=st.integers(1, 6),
    max_queued_tokens=st.integers(4, 60),
    vocab_size=st.sampled_from([None, 31, 30]),
)
TOKENS = st.integers(20, 30)
"""Ids that no fake model makes; the last is outside the smallest vocabulary."""

EXPANSIONS = st.lists(st.sampled_from([IMAGE, IMAGE, 8]), min_size=1, max_size=6)


class EngineAndModel(RuleBasedStateMachine):
    """Rules are events; after each, the engine's own check runs and outputs are compared."""

    @initialize(config=CONFIGS)
    def start(self, config: _core.EngineConfig) -> None:
        self.config = config
        self.engine = _core.Engine(config)
        self.model = NaiveModel(config, self.engine)
        self.plan: _core.StepPlan | None = None
        self.now = 100.0
        self.num_added = 0

    def some(self, data: st.DataObject) -> NaiveSequence:
        return self.model.live[data.draw(st.sampled_from(sorted(self.model.live)), label="sequence")]

    @rule(
        tokens=st.lists(st.one_of(TOKENS, TOKENS, TOKENS, st.just(IMAGE)), min_size=1, max_size=14),
        client=st.integers(0, 1),
        priority=st.sampled_from([0, 0, 0, -1]),
        patience=st.sampled_from([None, None, None, 2.0, 8.0]),
        age=st.sampled_from([0.0, 0.0, 1.0]),
        max_tokens=st.one_of(st.none(), st.integers(1, 8)),
        min_tokens=st.sampled_from([0, 0, 2]),
        stops=st.lists(st.integers(0, 11), max_size=2, unique=True),
        same_id=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        tokens: list[int],
        client: int,
        priority: int,
        patience: float | None,
        age: float,
        max_tokens: int | None,
        min_tokens: int,
        stops: list[int],
        same_id: bool,
    ) -> None:
        seq_id = self.num_added - 1 if same_id and self.num_added else self.num_added
        arrival = self.now - age
        deadline = None if patience is None else self.now + patience
        marks = [i for i, token in enumerate(tokens) if token == IMAGE]
        sequence = NaiveSequence(
            client=client,
            seq_id=seq_id,
            marked=tokens,
            images=[NaiveImage(mark) for mark in marks],
            order=(priority, math.inf if deadline is None else deadline, arrival, self.num_added),
            deadline=deadline,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stops=stops,
        )
        asked = request(
            seq_id,
            tokens,
            client=client,
            image_positions=marks,
            arrival=arrival,
            priority=priority,
            deadline=deadline,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
        )
        expected = self.model.expected_rejection(sequence)
        rejection = self.engine.add(asked, self.now)
        assert (rejection.code if rejection else None) == expected
        if rejection is None:
            self.model.live[seq_id] = sequence
            self.num_added += 1

    @precondition(lambda self: any(sequence.images for sequence in self.model.live.values()))
    @rule(data=st.data(), expansion=EXPANSIONS)
    def shape(self, data: st.DataObject, expansion: list[int]) -> None:
        sequence = self.some(data)
        if sequence.images:
            index = data.draw(st.integers(0, len(sequence.images) - 1))
            done = self.engine.set_shape(sequence.seq_id, index, i32(expansion))
            assert done == self.model.set_shape(sequence.seq_id, index, expansion)

    @precondition(lambda self: any(sequence.images for sequence in self.model.live.values()))
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        shaped = [i for i, image in enumerate(sequence.images) if image.expansion is not None]
        if shaped:
            image = sequence.images[index := data.draw(st.sampled_from(shaped))]
            assert self.engine.set_ready(sequence.seq_id, index) == (not image.ready)
            image.ready = True

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), by_vision=st.booleans())
    def end(self, data: st.DataObject, by_vision: bool) -> None:
        sequence = self.some(data)
        end = self.engine.fail_vision if by_vision else self.engine.abort
        assert end(sequence.seq_id, "because")
        assert not end(sequence.seq_id, "because")
        self.model.end(sequence, "vision_failed" if by_vision else "abort")

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def schedule(self) -> None:
        self.model.end_overdue(self.now)
        had_work = self.engine.has_work
        plan = self.engine.schedule(self.now)
        if self.plan is not None:
            assert plan is None
            assert not had_work
            return
        self.plan = plan
        if plan is not None:
            self.model.take_plan(plan)
        assert plan is not None or not self.engine.has_work

    @precondition(lambda self: self.plan is not None)
    @rule()
    def apply(self) -> None:
        assert self.plan is not None
        sampled = self.model.compute()
        self.engine.apply(self.plan.step_id, i32(sampled), self.now)
        self.model.take_tokens(sampled)
        self.plan = None

    @rule(steps=st.integers(1, 6))
    def several_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.schedule()
            self.look()
            if self.plan is None:
                return
            self.apply()
            self.look()

    @rule()
    def fail_step(self) -> None:
        self.engine.fail_step(self.now)
        self.model.lose_kv()
        self.model.end_overdue(self.now)
        self.plan = None
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

    def teardown(self) -> None:
        """All pictures come, and then everything must end."""
        if not hasattr(self, "engine"):
            return
        for sequence in list(self.model.live.values()):
            for index, image in enumerate(sequence.images):
                if sequence.seq_id not in self.model.live:
                    break
                done = self.engine.set_shape(sequence.seq_id, index, i32([IMAGE]))
                assert done == self.model.set_shape(sequence.seq_id, index, [IMAGE])
                assert self.engine.set_ready(sequence.seq_id, index) != (
                    image.ready or sequence.seq_id not in self.model.live
                )
                image.ready = True
        for _ in range(2000):
            if self.plan is None:
                self.schedule()
            else:
                self.apply()
            self.look()
            if not self.model.live and self.plan is None:
                break
        assert not self.model.live, "some sequence never ends"
        assert self.engine.stats().blocks_live == 0


TestEngineAndModel = EngineAndModel.TestCase
TestEngineAndModel.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
