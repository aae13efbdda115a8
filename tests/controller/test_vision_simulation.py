"""Many seeded worlds: whatever happens to the vision workers, each image ends once and nothing is left behind."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.controller.vision_world import World


@pytest.mark.parametrize(
    "first", [0, 10, *(pytest.param(first, marks=pytest.mark.slow) for first in range(20, 80, 10))]
)
def test_every_image_ends_once_and_nothing_leaks(first: int) -> None:
    for seed in range(first, first + 10):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_worlds_have_in_them_what_they_are_to_show() -> None:
    tally: Counter[str] = Counter()
    for seed in range(20):
        world = World(seed)
        world.run()
        tally += world.tally
    wanted = (
        "made",
        "cached",
        "refused",
        "kills",
        "stops",
        "stuck",
        "full",
        "damaged",
        "vision worker lost",
        "sent",
        "launches lost",
    )
    assert [what for what in wanted if not tally[what]] == [], tally
