"""A request's tokens are a function of the request alone: not of its neighbours, nor of how the server computes it.

The reference is each request by itself on a server that caches, drafts, overlaps, splits and preempts nothing. `make
test` runs combinations in which every pair of values occurs, `make test-matrix` all of them, and the reference then
comes from a server that was started for the one request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3, make_lfm2, make_llama, make_mimo
from tests.system.local_server import LocalServer
from tests.system.many_requests import Outcome, outcomes, outcomes_together, requests_of_all_kinds

pytestmark = pytest.mark.slow

AXES: dict[str, tuple[Any, ...]] = {
    "chunk": (16, 64, 2048),
    "cache": ("off", "warm"),
    "pool": ("roomy", "tight"),
    "overlap": (True, False),
    "ranks": (1, 2),
    "drafts": (0, 4),
}
MAX_MODEL_LEN = 200
KV_BLOCKS = {"roomy": None, "tight": 16}


@dataclass(frozen=True)
class Family:
    """A kind of model, and which drafter it is served with."""

    make: Callable[[Path], Path]
    takes_images: bool
    draft_method: str


FAMILIES = {
    "llama": Family(make_llama, False, "ngram"),
    "idefics3": Family(make_idefics3, True, "ngram"),
    "mimo": Family(make_mimo, False, "mtp"),
    "lfm2": Family(make_lfm2, False, "ngram"),
}


def pairwise(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Combinations in which each pair of values of two axes occurs: those that add most pairs first."""

    def pairs(combination: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    everything = list(itertools.product(*axes.values()))
    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(dict(zip(axes, best, strict=True)))
    return chosen


def all_combinations() -> list[dict[str, Any]]:
    return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(f"{axis}_{value}" for axis, value in combination.items())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--matrix")
        chosen = all_combinations() if whole else pairwise(AXES)
        metafunc.parametrize("combination", chosen, ids=name_of)


@dataclass(frozen=True)
class Reference:
    """A checkpoint, requests, and what comes of each alone."""

    family: Family
    model: Path
    requests: list[pb.GenerateRequest]
    answers: list[list[Outcome]]


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family = FAMILIES[request.param]
    model = family.make(tmp_path_factory.mktemp(request.param))
    requests = requests_of_all_kinds(family.takes_images)
    plain = {axis: values[-1] for axis, values in AXES.items()} | {
        "cache": "off",
        "pool": "roomy",
        "ranks": 1,
        "drafts": 0,
    }
    if request.config.getoption("--matrix"):
        answers = []
        for one in requests:
            with start(family, model, plain) as server:
                answers.append(outcomes(server, one))
    else:
        with start(family, model, plain) as server:
            answers = [outcomes(server, one) for one in requests]
    return Reference(family, model, requests, answers)


def start(family: Family, model: Path, combination: dict[str, Any]) -> LocalServer:
    engine: dict[str, Any] = {
        "max_num_seqs": 12,
        "max_num_batched_tokens": combination["chunk"],
        # Chunks are as large beside decodes; but those of 64 are smaller there, as they are by default.
        "max_num_mixed_tokens": "auto" if combination["chunk"] == 64 else combination["chunk"],
        "enable_prefix_caching": combination["cache"] == "warm",
        "async_scheduling": combination["overlap"],
        "tensor_parallel_size": combination["ranks"],
    }
    if combination["drafts"]:
        engine["drafts"] = {"method": family.draft_method, "max_tokens": combination["drafts"]}
    kv_blocks = KV_BLOCKS[combination["pool"]]
    return LocalServer(model, kv_blocks=kv_blocks, model={"max_model_len": MAX_MODEL_LEN}, engine=engine)


def test_among_others(reference: Reference, combination: dict[str, Any]) -> None:
    with start(reference.family, reference.model, combination) as server:
        first = outcomes_together(server, reference.requests, seed=1)
        assert first == reference.answers
        if combination["cache"] == "warm":
            assert outcomes_together(server, reference.requests, seed=2) == reference.answers
        gauges = server.gauges()
    if combination["pool"] == "tight":  # in a roomy one, only a sequence whose grammar takes long gives way
        assert gauges.num_preemptions > 0
    assert (gauges.prefix_cache_hits > 0) == (combination["cache"] == "warm")
    assert (gauges.draft_tokens > 0) == (combination["drafts"] > 0)
    assert gauges.kv_blocks_live == gauges.state_slots_live == 0
    assert gauges.kv_blocks_free == gauges.kv_blocks_total


def test_pairwise_has_every_pair() -> None:
    chosen = pairwise(AXES)
    for (a, values_a), (b, values_b) in itertools.combinations(AXES.items(), 2):
        for pair in itertools.product(values_a, values_b):
            assert any((row[a], row[b]) == pair for row in chosen), (a, b, pair)
    assert len(chosen) < 12
