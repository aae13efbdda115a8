"""The edges: one less, exactly, one more."""

from __future__ import annotations

import math
import struct

import pytest

from airside import _core
from tests.engine.columns import IMAGE, config, i32, ints, plan_rows, request, token_rows


class Driver:
    """Runs an engine whose model always makes token 50, and keeps what clients are told."""

    def __init__(self, **values: object) -> None:
        self.engine = _core.Engine(config(**values))
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, _core.Finish] = {}
        self.now = 0.0

    def add(self, seq_id: int, tokens: int | list[int], **values: object) -> str | None:
        rejection = self.engine.add(request(seq_id, tokens, **values), self.now)
        return rejection.code if rejection else None

    def step(self, token: int = 50) -> bool:
        plan = self.engine.schedule(self.now)
        if plan is not None:
            self.engine.apply(plan.step_id, i32([token] * sum(plan.sampled)), self.now)
        self.engine.check()
        for output in self.engine.take_outputs():
            for seq_id, made in token_rows(output):
                self.tokens.setdefault(seq_id, []).extend(made)
            self.ends |= {finish.seq_id: finish for finish in output.finished}
        return plan is not None

    def drain(self) -> None:
        for _ in range(500):
            if not self.step():
                return
        raise AssertionError("it never ends")


@pytest.mark.parametrize(("tokens", "code"), [(46, None), (47, None), (48, "context_exceeded")])
def test_prompt_against_the_context(tokens: int, code: str | None) -> None:
    driver = Driver(max_model_len=48)
    assert driver.add(1, tokens) == code
    driver.drain()
    if code is None:
        assert driver.ends[1].reason == "length"
        assert driver.ends[1].completion_tokens == 48 - tokens


@pytest.mark.parametrize(("tokens", "code"), [(14, None), (15, None), (16, "pool_exceeded")])
def test_prompt_against_the_pool(tokens: int, code: str | None) -> None:
    driver = Driver(num_blocks=4, block_size=4)
    assert driver.add(1, tokens) == code
    driver.drain()
    if code is None:
        assert driver.ends[1].reason == "length"
        assert "KV pool of 16" in driver.ends[1].detail
        assert driver.ends[1].completion_tokens == 16 - tokens


def test_a_rejection_tells_both_numbers() -> None:
    engine = _core.Engine(config(max_model_len=48, num_blocks=10, block_size=4))
    for tokens, code, limit in [(60, "context_exceeded", "48"), (40, "pool_exceeded", "39")]:
        rejection = engine.add(request(1, tokens), 0.0)
        assert rejection is not None
        assert rejection.code == code
        assert str(tokens) in rejection.detail
        assert limit in rejection.detail


@pytest.mark.parametrize(("tokens", "blocks"), [(3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_blocks_are_taken_as_tokens_need_them(tokens: int, blocks: int) -> None:
    engine = _core.Engine(config(block_size=4))
    engine.add(request(1, tokens), 0.0)
    plan = engine.schedule(0.0)
    assert plan is not None
    assert [len(row.blocks) for row in plan_rows(plan)] == [blocks]
    assert engine.stats().blocks_live == blocks


def test_the_last_block_of_the_pool_is_used() -> None:
    driver = Driver(num_blocks=2, block_size=4, max_num_seqs=1)
    driver.add(1, 4, max_tokens=4)
    free = []
    while driver.step():
        free.append(driver.engine.stats().blocks_free)
    assert free == [1, 0, 0, 2]
    assert driver.tokens[1] == [50] * 4


@pytest.mark.parametrize(
    ("max_tokens", "made", "detail"),
    [(1, 1, "max_tokens 1"), (7, 7, "max_tokens 7"), (8, 8, "max_tokens 8"), (9, 8, "context"), (None, 8, "context")],
)
def test_max_tokens(max_tokens: int | None, made: int, detail: str) -> None:
    driver = Driver(max_model_len=18)
    driver.add(1, 10, max_tokens=max_tokens)
    driver.drain()
    assert driver.tokens[1] == [50] * made
    assert driver.ends[1].reason == "length"
    assert detail in driver.ends[1].detail


@pytest.mark.parametrize(("min_tokens", "made"), [(0, 1), (1, 2), (3, 4), (20, 8)])
def test_min_tokens_come_before_a_stop(min_tokens: int, made: int) -> None:
    driver = Driver()
    driver.add(1, 4, max_tokens=8, min_tokens=min_tokens, stop_token_ids=[50])
    driver.drain()
    assert driver.tokens[1] == [50] * made
    assert driver.ends[1].reason == ("stop" if made < 8 else "length")


@pytest.mark.parametrize(("budget", "steps"), [(7, 2), (8, 1), (9, 1), (1, 8), (3, 3)])
def test_chunks_fill_the_budget(budget: int, steps: int) -> None:
    driver = Driver(max_num_batched_tokens=budget)
    driver.add(1, 8, max_tokens=1)
    driver.drain()
    assert driver.engine.stats().steps == steps


@pytest.mark.parametrize("num_decodes", [3, 4, 5])
def test_more_decodes_than_the_budget(num_decodes: int) -> None:
    driver = Driver(max_num_batched_tokens=4)
    for seq_id in range(num_decodes):
        driver.add(seq_id, 2, max_tokens=5)
    driver.drain()
    assert {seq_id: len(made) for seq_id, made in driver.tokens.items()} == dict.fromkeys(range(num_decodes), 5)


def test_each_final_status_can_be_reached() -> None:
    driver = Driver(num_blocks=5, block_size=4, max_model_len=20, preemption="stop")
    driver.add(1, 6, max_tokens=9)
    driver.add(2, 6, max_tokens=9)
    driver.drain()
    driver.add(3, 6, stop_token_ids=[50])
    driver.add(4, 6)
    driver.engine.abort(4, "disconnect")
    for seq_id in (5, 6):
        driver.add(seq_id, [1, IMAGE], image_positions=[1])
    driver.engine.set_shape(5, 0, i32([IMAGE] * 30))
    driver.engine.fail_vision(6, "image 0: truncated")
    driver.drain()
    reasons = {seq_id: finish.reason for seq_id, finish in driver.ends.items()}
    assert reasons == {
        1: "length",
        2: "insufficient_system_resource",
        3: "stop",
        4: "abort",
        5: "prompt_length_exceeded",
        6: "vision_failed",
    }
    counted = driver.engine.stats().finished
    assert counted == {**dict.fromkeys(reasons.values(), 1), "structured_output_failed": 0}


def test_a_finish_says_what_the_sequence_was_at() -> None:
    driver = Driver(max_num_batched_tokens=4, max_num_seqs=3)
    picture = {"image_positions": [4], "image_hashes": [b"a" * 16]}
    driver.add(1, 1, max_tokens=9)
    driver.add(2, [20, 21, 22, 23, IMAGE], **picture)
    driver.engine.set_shape(2, 0, i32([IMAGE]))
    assert driver.add(3, 40) is None
    driver.add(4, 8)
    for _ in range(4):
        driver.step()
    for seq_id in (1, 2, 3, 4):
        driver.engine.abort(seq_id, "deadline")
    driver.add(5, [IMAGE], image_positions=[0])
    driver.engine.abort(5, "deadline")
    driver.drain()
    stages = {seq_id: finish.stage for seq_id, finish in driver.ends.items()}
    assert stages == {1: "decode", 2: "images", 3: "prefill", 4: "queue", 5: "images"}


def test_times_of_a_finish() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.now = 10.0
    driver.add(1, 8, arrival=9.0, max_tokens=2)
    driver.add(2, 8, arrival=9.5)
    driver.now = 11.0
    driver.step()
    driver.now = 12.5
    driver.step()
    driver.now = 15.0
    driver.step()
    driver.engine.abort(2, "cancel")
    driver.step()
    finish = driver.ends[1]
    assert (finish.queued_s, finish.time_to_first_token_s, finish.decode_s) == (2.0, 3.5, 2.5)
    finish = driver.ends[2]
    assert (finish.queued_s, finish.time_to_first_token_s, finish.decode_s) == (5.5, 0.0, 0.0)


def test_tokens_are_counted_once_and_recomputed_ones_apart() -> None:
    driver = Driver()
    driver.add(1, 5, max_tokens=3)
    driver.step()
    driver.engine.fail_step(0.0)
    driver.drain()
    stats = driver.engine.stats()
    assert (stats.prompt_tokens, stats.recomputed_tokens, stats.generation_tokens, stats.steps) == (5, 5, 3, 3)
    assert driver.tokens[1] == [50] * 3


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [([1, IMAGE], []), ([1, IMAGE], [0]), ([IMAGE], [1]), ([IMAGE], [-1]), ([IMAGE] * 2, [1, 0]), ([IMAGE], [0, 0])],
)
def test_image_positions_that_do_not_fit_the_prompt(tokens: list[int], positions: list[int]) -> None:
    assert Driver().add(1, tokens, image_positions=positions) == "invalid"


def test_shapes_in_any_order_and_late_news() -> None:
    driver = Driver()
    driver.add(1, [1, IMAGE, 2, IMAGE, IMAGE], image_positions=[1, 3, 4], max_tokens=1)
    engine = driver.engine
    assert engine.set_shape(1, 2, i32([IMAGE, 8]))
    with pytest.raises(ValueError, match="before its shape"):
        engine.set_ready(1, 1)
    assert engine.set_shape(1, 0, i32([8, IMAGE, IMAGE]))
    assert not engine.set_shape(1, 0, i32([8]))
    assert not engine.has_work
    assert engine.set_shape(1, 1, i32([9, 8, IMAGE, 9, IMAGE]))
    for index in (0, 1, 2):
        assert engine.set_ready(1, index)
        assert not engine.set_ready(1, index)
    plan = engine.schedule(0.0)
    assert plan is not None
    assert ints(plan.token_ids) == [1, 8, IMAGE, IMAGE, 2, 9, 8, IMAGE, 9, IMAGE, IMAGE, 8]
    assert plan.images == [(1, 0, 0, 2), (1, 1, 0, 2), (1, 2, 0, 1)]
    engine.apply(plan.step_id, i32([50]), 0.0)
    assert not engine.set_shape(1, 0, i32([8]))
    assert not engine.set_ready(1, 0)
    (output,) = engine.take_outputs()
    assert (output.finished[0].prompt_tokens, output.finished[0].image_tokens) == (12, 10)


@pytest.mark.parametrize(("index", "expansion"), [(1, [IMAGE]), (-1, [IMAGE]), (0, [])])
def test_a_shape_of_no_image_is_a_mistake(index: int, expansion: list[int]) -> None:
    driver = Driver()
    driver.add(1, [IMAGE], image_positions=[0])
    with pytest.raises(ValueError, match=r"image|token"):
        driver.engine.set_shape(1, index, i32(expansion))


def test_apply_refuses_what_was_not_asked_and_changes_nothing() -> None:
    engine = _core.Engine(config())
    engine.add(request(1, 4), 0.0)
    plan = engine.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match="not in flight"):
        engine.apply(plan.step_id + 1, i32([50]), 0.0)
    with pytest.raises(ValueError, match="2 tokens came, but the step has 1"):
        engine.apply(plan.step_id, i32([50, 51]), 0.0)
    with pytest.raises(ValueError, match="whole number"):
        engine.apply(plan.step_id, b"abc", 0.0)
    engine.check()
    engine.apply(plan.step_id, i32([50]), 0.0)
    with pytest.raises(ValueError, match="not in flight"):
        engine.apply(plan.step_id, i32([50]), 0.0)


def test_sampling_values_arrive_as_they_were_asked() -> None:
    engine = _core.Engine(config())
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 2**64 - 1}
    engine.add(request(2**63 + 5, 4, **values), 0.0)
    plan = engine.schedule(0.0)
    assert plan is not None
    assert ints(plan.seq_ids, "Q") == [2**63 + 5]
    columns = (plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.seed, plan.position)
    assert struct.unpack("<fiffQq", b"".join(columns)) == (0.5, 3, 0.25, 0.125, 2**64 - 1, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_num_mixed_tokens": -1},
        {"max_model_len": 1},
        {"vocab_size": 0},
        {"preemption": "swap"},
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        config(**values)


@pytest.mark.parametrize(
    ("tokens", "stops", "detail"),
    [
        ([0, 99], [99], None),
        ([5, 6, 100], [], "token_ids[2] is 100, but the model's token ids are in [0, 100)"),
        ([5, -1], [], "token_ids[1] is -1, but the model's token ids are in [0, 100)"),
        ([5], [3, 100], "stop_token_ids[1] is 100, but the model's token ids are in [0, 100)"),
        ([5], [-1], "stop_token_ids[0] is -1, but the model's token ids are in [0, 100)"),
    ],
)
def test_tokens_against_the_vocabulary(tokens: list[int], stops: list[int], detail: str | None) -> None:
    engine = _core.Engine(config(vocab_size=100))
    rejection = engine.add(request(1, tokens, stop_token_ids=stops), 0.0)
    assert (rejection and (rejection.code, rejection.detail)) == (detail and ("invalid", detail))
    assert _core.Engine(config()).add(request(1, tokens, stop_token_ids=stops), 0.0) is None  # unchecked
    assert engine.status(1) == (None if detail else "WAITING")


def test_an_expansion_against_the_vocabulary() -> None:
    engine = _core.Engine(config(vocab_size=100))
    engine.add(request(1, [IMAGE], image_positions=[0]), 0.0)
    with pytest.raises(ValueError, match=r"expansion\[1\] is 100"):
        engine.set_shape(1, 0, i32([IMAGE, 100]))
    assert engine.set_shape(1, 0, i32([IMAGE, 99]))


def test_queue_position_counts_those_ahead() -> None:
    driver = Driver(max_num_seqs=1)
    for seq_id in range(4):
        driver.add(seq_id, 4, arrival=float(-seq_id))
    assert [driver.engine.queue_position(seq_id) for seq_id in range(4)] == [3, 2, 1, 0]
    driver.step()
    assert driver.engine.status(3) == "RUNNING"
    assert [driver.engine.queue_position(seq_id) for seq_id in (0, 1, 2, 3, 99)] == [2, 1, 0, 0, 0]
    assert driver.engine.status(99) is None


def test_a_deadline_that_is_not_a_time() -> None:
    assert Driver().add(1, 4, deadline=math.nan) == "invalid"
