"""Whose blocks are taken, and that it makes no difference to anybody's tokens."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.engine.driver import Driver
from tests.engine.fake_model import continuation

RULES = ["least_waste", "most_output", "last"]


def crowded(rule: str, **values: object) -> Driver:
    """1 takes the last blocks while 2, 3 and 4, which differ in what they have computed and made, hold some."""
    driver = Driver(**{"num_blocks": 12, "block_size": 4, "max_model_len": 40, "victim_rule": rule, **values})
    driver.add(1, [20, 21], max_tokens=30)
    driver.add(2, [30 + i for i in range(14)], max_tokens=12)
    driver.step()
    driver.add(3, [50, 51, 52], max_tokens=16)
    driver.step()
    driver.step()
    driver.add(4, [60 + i for i in range(6)], max_tokens=16)
    return driver


def first_victim(driver: Driver) -> int | None:
    while driver.step():
        for seq_id in (2, 3, 4):
            if driver.engine.status(seq_id) == "WAITING" and seq_id in driver.admitted:
                return seq_id
    return None


# When 1 needs a block, 2 has made the most tokens; 3 and 4 hold fewer computed ones for each of their blocks.
@pytest.mark.parametrize(("rule", "victim"), [("most_output", 2), ("last", 4)])
def test_who_gives(rule: str, victim: int) -> None:
    assert first_victim(crowded(rule)) == victim


def test_least_waste_counts_tokens_per_block_gained() -> None:
    """Of two sequences with two blocks each, the one that has filled fewer of their places gives."""
    for first, second, victim in [(5, 8, 2), (8, 5, 3)]:
        driver = Driver(
            num_blocks=5, block_size=4, max_model_len=20, max_num_batched_tokens=8, victim_rule="least_waste"
        )
        driver.add(1, [20, 21, 22], max_tokens=12)
        driver.add(2, [30 + i for i in range(first)], max_tokens=9)
        driver.add(3, [40 + i for i in range(second)], max_tokens=9)
        gave = [
            seq_id
            for _ in range(30)
            if driver.step()
            for seq_id in (2, 3)
            if driver.engine.status(seq_id) == "WAITING" and seq_id in driver.admitted
        ]
        assert gave[0] == victim, (first, second)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_rule_leads_to_the_same_tokens(rule: str, caching: bool, overlap: bool) -> None:
    driver = crowded(rule, enable_prefix_caching=caching, async_scheduling=overlap)
    driver.drain()
    assert driver.engine.stats().num_preemptions > 0
    assert driver.tokens == {
        1: continuation([20, 21], 30),
        2: continuation([30 + i for i in range(14)], 12),
        3: continuation([50, 51, 52], 16),
        4: continuation([60 + i for i in range(6)], 16),
    }


@pytest.mark.parametrize("rule", RULES)
def test_the_first_in_order_is_never_a_victim(rule: str) -> None:
    dice = random.Random(5)
    driver = Driver(num_blocks=10, block_size=2, max_model_len=20, victim_rule=rule, max_num_seqs=6)
    for seq_id in range(12):
        driver.add(seq_id, [20 + dice.randrange(9) for _ in range(dice.randint(1, 9))], max_tokens=dice.randint(4, 10))
    driver.drain()
    assert driver.engine.stats().num_preemptions > 0
    assert driver.ends[driver.admitted[0]].preemptions == 0
    assert len(driver.ends) == 12


def test_blocks_that_others_share_are_no_gain() -> None:
    """Taking from a sequence whose blocks are all shared would free nothing: its neighbour gives."""
    prompt = [20 + i for i in range(8)]
    driver = Driver(num_blocks=8, block_size=4, max_model_len=32, enable_prefix_caching=True, victim_rule="last")
    driver.add(1, [*prompt, 30], max_tokens=20)
    driver.add(2, [*prompt, 31], max_tokens=12)
    driver.add(3, [*prompt, 32], max_tokens=12)
    driver.drain()
    assert driver.tokens == {
        1: continuation([*prompt, 30], 20),
        2: continuation([*prompt, 31], 12),
        3: continuation([*prompt, 32], 12),
    }
    assert driver.ends[1].preemptions == 0
    # What is shared with one that goes on is found again when a victim comes back.
    assert driver.ends[3].preemptions == 1
    assert driver.engine.stats().recomputed_tokens <= 8


@pytest.mark.slow
def test_the_simulator_compares_the_rules() -> None:
    """Least waste, the default, recomputes the least, with and without the prefix cache."""
    simulator = Path(__file__).parents[2] / "build/sim/simulator"
    assert simulator.exists(), "run `make sim`, as `make test` does"
    table = subprocess.run([simulator, "--compare-victims"], check=True, capture_output=True, text=True, timeout=300)
    rows = [line.split() for line in table.stdout.splitlines()[2:]]
    recomputed = {(rule, cache): float(per_token) for rule, cache, _, _, per_token, _ in rows}
    assert len(recomputed) == 6
    for cache in ("on", "off"):
        assert recomputed["least_waste", cache] == min(recomputed[rule, cache] for rule in RULES)
