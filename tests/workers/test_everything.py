"""A request's tokens and records are its own, whatever the engine does with it and with the others."""

from __future__ import annotations

import dataclasses
import select
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from llguidance import LLMatcher

from airside._core import Engine, EngineConfig, Request, Stats
from airside.controller.plan_message import output_frame, plan_frame
from airside.controller.vision.ledger import VisionLedger
from airside.proto.messages import GrammarReady, OpenGrammar, OutputBatch, StepPlan, StepResult, decode
from airside.workers.engram import primes_up_to
from airside.workers.load import load_runner
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from tests.checkpoints import add_engram, make_lfm2, make_llama, make_mimo
from tests.workers.ranks import PATIENCE_S, Ranks, start_ranks
from tests.workers.step_plans import BLOCK_SIZE, lone_runner, worker_settings

NUM_BLOCKS, NUM_TOKENS, STEPS_MAX = 128, 18, 3000
SHARED = np.random.default_rng(1).integers(60, 500, 22).tolist()
RULES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
ENGRAM = {"layers": [0, 1], "table_size": 211, "num_heads": 2, "dim": 8, "max_ngram": 3, "seed": 7}
DIGITS, WORDS = r"[0-9]{60}", r"(ab|cd|e[0-9]){2,5}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request: its prompt, the Request values that differ from the default, and its grammar."""

    prompt: list[int]
    values: dict[str, Any] = field(default_factory=dict)
    pattern: str = ""


def golden(tokens: range) -> bytes:
    return np.array(tokens, np.int32).tobytes()


WANTED = [
    Wanted(SHARED, {"temperature": 0.0}),
    Wanted([*SHARED, 7, 8, 9], {"seed": 5, "top_k": 60, "logprobs": 3}),
    Wanted([11, 12] * 8, {"temperature": 0.0, **RULES}),
    Wanted([11, 12] * 9, {"seed": 6, "logit_bias": {11: 2.0, 12: 2.0}, "allowed_token_ids": [11, 12, 13, 40]}),
    Wanted(SHARED[:9], {"seed": 7}, DIGITS),
    Wanted([*SHARED, 41], {"seed": 8, "logprobs": 0, "presence_penalty": 1.0}, WORDS),
    Wanted(SHARED[3:], {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1}),
    Wanted([5], {"seed": 9, "top_p": 0.9, "min_p": 0.01, "stop_token_ids": list(range(0, 500, 9)), "min_tokens": 6}),
    Wanted([11, 12, 11], {"temperature": 0.0, "logit_bias": {500: 50.0}, "logprobs": 5, **RULES}),
    Wanted([70, *SHARED], {"golden_tokens": golden(range(90, 99)), "golden_mode": "force", "logprobs": 1}),
    Wanted([11, 12] * 5, {"seed": 4, "golden_tokens": golden(range(90, 99)), "golden_mode": "draft", **RULES}),
]


@dataclass(slots=True)
class Served:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    records: bytes = b""
    prompt_records: bytes = b""
    reason: str = ""


class Rank(Protocol):
    """What executes the plans."""

    def step(self, plan: StepPlan) -> StepResult: ...

    def open_grammar(self, seq_id: int, grammar: str, output_ids: bytes = b"") -> None:
        """Returns when it is built."""


class OneRank:
    """In this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def step(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        assert result is not None
        return result

    def open_grammar(self, seq_id: int, grammar: str, output_ids: bytes = b"") -> None:
        grammars = self._runner.grammars
        assert grammars is not None
        grammars.open(seq_id, grammar, output_ids)
        assert select.select([grammars.wake_fd], [], [], PATIENCE_S)[0]
        assert grammars.poll() == [GrammarReady(seq_id)]


class TwoRanks:
    """In processes of their own."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.step = ranks.step

    def open_grammar(self, seq_id: int, grammar: str, output_ids: bytes = b"") -> None:
        assert self._ranks.hub.send("worker-0", OpenGrammar(seq_id, grammar, output_ids))
        assert self._ranks.wait_for(GrammarReady)[1] == GrammarReady(seq_id)


@pytest.fixture(scope="module")
def runner(llama_path: Path) -> ModelRunner:
    return load_runner(worker_settings(str(llama_path)), RankGroup(0, 1), PixelArena())


def serve(
    rank: Rank,
    requests: dict[int, Wanted],
    every: int = 1,
    relaunch: Callable[[], Rank | None] = lambda: None,
    **changes: Any,
) -> tuple[dict[int, Served], Stats]:
    """Serves these requests by their sequence ids, a new one each so many steps.

    Args:
        relaunch: asked before each step; a rank, when the one so far is lost with what was in flight.
    """
    values: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": 512,
    }
    engine = Engine(EngineConfig(**{**values, **changes}))
    served: dict[int, Served] = defaultdict(Served)
    waiting, in_flight = deque(requests.items()), deque[StepPlan]()
    for step in range(STEPS_MAX):
        if waiting and step % every == 0:
            _add(rank, engine, *waiting.popleft(), step)
        while (plan := engine.schedule(float(step))) is not None:
            message = decode(plan_frame(plan, VisionLedger()))
            assert isinstance(message, StepPlan)
            in_flight.append(message)
        if (fresh := relaunch()) is not None:
            rank = fresh
            in_flight.clear()
            engine.fail_step(float(step))
            _open_again(rank, engine, requests)
        elif in_flight:
            _apply(engine, rank.step(in_flight.popleft()), step)
        for output in engine.take_outputs():
            batch = decode(output_frame(output))
            assert isinstance(batch, OutputBatch)
            _collect(served, batch)
        if not (waiting or in_flight or engine.has_work):
            engine.check()
            return dict(served), engine.stats()
    raise AssertionError(f"not done after {STEPS_MAX} steps: {served}")


def _add(rank: Rank, engine: Engine, seq_id: int, wanted: Wanted, step: int) -> None:
    request = Request(
        client=0,
        seq_id=seq_id,
        token_ids=np.array(wanted.prompt, np.int32).tobytes(),
        arrival=float(step),
        max_tokens=NUM_TOKENS,
        structured=bool(wanted.pattern),
        **wanted.values,
    )
    assert engine.add(request, float(step)) is None
    if wanted.pattern:
        rank.open_grammar(seq_id, LLMatcher.grammar_from_regex(wanted.pattern))
        engine.set_grammar_ready(seq_id)


def _open_again(rank: Rank, engine: Engine, requests: dict[int, Wanted]) -> None:
    for seq_id in engine.structured_ids():
        grammar = LLMatcher.grammar_from_regex(requests[seq_id].pattern)
        rank.open_grammar(seq_id, grammar, engine.output_ids(seq_id))
        engine.set_grammar_ready(seq_id)


def _apply(engine: Engine, result: StepResult, step: int) -> None:
    engine.apply(
        result.step_id,
        result.sampled,
        float(step),
        logprobs=result.logprobs,
        prompt_logprobs=result.prompt_logprobs,
        num_drafts=result.num_drafts,
        draft_tokens=result.draft_tokens,
        draft_confidences=result.draft_confidences,
    )


def _collect(served: dict[int, Served], batch: OutputBatch) -> None:
    begin = 0
    sizes = np.frombuffer(batch.logprob_sizes, np.int32).tolist()
    for index, (seq_id, tokens) in enumerate(batch.rows()):
        served[seq_id].tokens += tokens
        if sizes:
            served[seq_id].records += batch.logprobs[begin : begin + sizes[index]]
            begin += sizes[index]
    begin = 0
    prompt_ids = np.frombuffer(batch.prompt_seq_ids, np.uint64).tolist()
    for seq_id, size in zip(prompt_ids, np.frombuffer(batch.prompt_sizes, np.int32).tolist(), strict=True):
        served[seq_id].prompt_records += batch.prompt_logprobs[begin : begin + size]
        begin += size
    for finish in batch.finished:
        served[finish.seq_id].reason = finish.reason


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[int, Served]:
    return serve_alone(runner)


def serve_alone(runner: ModelRunner) -> dict[int, Served]:
    """Each by itself, whole, one step after the other, nothing cached."""
    plain = {"async_scheduling": False, "enable_prefix_caching": False, **of_model(runner)}
    served: dict[int, Served] = {}
    for seq_id, wanted in enumerate(WANTED):
        runner.allocate(NUM_BLOCKS)
        served |= serve(OneRank(runner), {seq_id: wanted}, **plain)[0]
    return served


def of_model(runner: ModelRunner) -> dict[str, int]:
    return {"num_state_slots": runner.num_state_slots, "tail_tokens": runner._config.tail_tokens}


def test_what_is_asked_for_is_there(alone: dict[int, Served]) -> None:
    assert all(1 <= len(own.tokens) <= NUM_TOKENS for own in alone.values())
    assert {own.reason for own in alone.values()} == {"length", "stop"}
    for seq_id, own in alone.items():
        k = WANTED[seq_id].values.get("logprobs", -1)
        assert len(own.records) == (len(own.tokens) * (16 + 8 * k) if k >= 0 else 0)
    assert len(alone[6].prompt_records) == (len(WANTED[6].prompt) - 1) * (16 + 8 * 2)
    assert set(alone[3].tokens) <= {11, 12, 13, 40}


def offer(wanted: Wanted, tokens: list[int]) -> Wanted:
    """The same request with what it will make as drafts, some of them spoilt."""
    if "golden_tokens" in wanted.values:
        return wanted
    golden_tokens = np.array(tokens, np.int32).tobytes()
    values = {"golden_tokens": golden_tokens, "golden_mode": "draft", "golden_acceptance": 0.8}
    return dataclasses.replace(wanted, values={**wanted.values, **values})


def serve_together(
    runner: ModelRunner, alone: dict[int, Served], num_blocks: int, drafts: str, budget: int, *, ahead: bool = True
) -> tuple[dict[int, Served], Stats]:
    """All of WANTED, in a shuffled order, the later ones while the first are served."""
    runner.allocate(num_blocks)
    order = np.random.default_rng(budget + num_blocks).permutation(len(WANTED)).tolist()
    requests = {seq_id: WANTED[seq_id] for seq_id in order}
    if drafts == "golden":
        requests = {seq_id: offer(own, alone[seq_id].tokens) for seq_id, own in requests.items()}
    return serve(
        OneRank(runner),
        requests,
        every=1 if budget > 30 else 3,
        num_blocks=num_blocks,
        async_scheduling=ahead,
        draft_method=drafts if drafts != "golden" else "none",
        max_draft_tokens=0 if drafts == "none" else 3,
        max_num_batched_tokens=budget,
        **of_model(runner),
    )


def check_stats(stats: Stats, num_blocks: int, drafts: str, budget: int) -> None:
    """That what was to be tried has happened."""
    assert stats.prefix_cache_hits > 0
    if num_blocks < NUM_BLOCKS and budget > 30:
        assert stats.num_preemptions > 0
    assert stats.accepted_tokens > {"none": -1, "ngram": 0, "golden": 30, "mtp": 0}[drafts]


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 16])
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("drafts", ["none", "ngram", "golden"])
@pytest.mark.parametrize("budget", [64, 7])
def test_it_is_the_same_in_any_company(
    runner: ModelRunner, alone: dict[int, Served], num_blocks: int, ahead: bool, drafts: str, budget: int
) -> None:
    served, stats = serve_together(runner, alone, num_blocks, drafts, budget, ahead=ahead)
    assert served == alone
    check_stats(stats, num_blocks, drafts, budget)


@pytest.mark.parametrize(("drafts", "num_blocks"), [("none", NUM_BLOCKS), ("ngram", 16), ("golden", 16)])
def test_a_new_launch_goes_on_where_the_one_before_it_was_lost(
    llama_path: Path, alone: dict[int, Served], drafts: str, num_blocks: int
) -> None:
    chance = np.random.default_rng(num_blocks)
    launches = []

    def launch() -> Rank:
        runner = lone_runner(llama_path, num_blocks)
        launches.append(runner)
        return OneRank(runner)

    def relaunch() -> Rank | None:
        return launch() if len(launches) < 8 and chance.random() < 0.15 else None

    requests = dict(enumerate(WANTED))
    if drafts == "golden":
        requests = {seq_id: offer(own, alone[seq_id].tokens) for seq_id, own in requests.items()}
    method = drafts if drafts != "golden" else "none"
    served, _ = serve(launch(), requests, 2, relaunch, num_blocks=num_blocks, draft_method=method, max_draft_tokens=3)
    assert served == alone
    assert len(launches) > 3


@pytest.fixture(scope="module", params=["lfm2", "mimo", "engram"])
def other_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "lfm2":
            settings = worker_settings(str(make_lfm2(path)), max_draft_tokens=3)
        case "mimo":
            settings = worker_settings(str(make_mimo(path, context=0.05)), max_draft_tokens=3, draft_method="mtp")
        case _:
            add_engram(make_llama(path, seed=4), 128, sum(primes_up_to(211, 4)), ENGRAM)
            settings = worker_settings(str(path), max_draft_tokens=3)
    return load_runner(settings, RankGroup(0, 1), PixelArena())


@pytest.fixture(scope="module")
def other_alone(other_runner: ModelRunner) -> dict[int, Served]:
    return serve_alone(other_runner)


@pytest.mark.parametrize(
    ("num_blocks", "drafts", "budget"), [(NUM_BLOCKS, "own", 7), (16, "own", 64), (16, "golden", 64)]
)
def test_other_families_are_no_different(
    other_runner: ModelRunner, other_alone: dict[int, Served], num_blocks: int, drafts: str, budget: int
) -> None:
    if drafts == "own":
        drafts = "mtp" if other_runner._config.num_draft_layers else "ngram"
    served, stats = serve_together(other_runner, other_alone, num_blocks, drafts, budget)
    assert {seq_id: of_the_model(seq_id, own) for seq_id, own in served.items()} == {
        seq_id: of_the_model(seq_id, own) for seq_id, own in other_alone.items()
    }
    check_stats(stats, num_blocks, drafts, budget)


def of_the_model(seq_id: int, served: Served) -> Served:
    """Without what records say of the draft head: that depends on what it was asked."""
    k = WANTED[seq_id].values.get("logprobs", -1)
    if k < 0:
        return served
    table = np.frombuffer(served.records, np.int32).reshape(-1, 4 + 2 * k).copy()
    table[:, 2:4] = 0
    return dataclasses.replace(served, records=table.tobytes())


def test_two_ranks_make_the_tokens_of_one(llama_path: Path, alone: dict[int, Served]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="airside-test-") as folder,
        start_ranks(llama_path, Path(folder), 2) as ranks,
    ):
        ranks.set_up(16)
        served, stats = serve(TwoRanks(ranks), dict(enumerate(WANTED)), num_blocks=16, max_num_batched_tokens=20)
        assert ranks.shut_down() == [0, 0]
    assert {seq_id: own.tokens for seq_id, own in served.items()} == {
        seq_id: own.tokens for seq_id, own in alone.items()
    }
    assert stats.num_preemptions > 0
