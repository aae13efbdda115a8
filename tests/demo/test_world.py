"""The answers are right: counted again from the pixels and from the scene's bare numbers, for whatever is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from airside.cluster.demo_model.training.drawing import draw
from airside.cluster.demo_model.training.facts import facts
from airside.cluster.demo_model.training.questions import ABOUT_DIGITS, NUMBERS, Kind, Question, ask, scenes_for
from airside.cluster.demo_model.training.scans import Scans
from airside.cluster.demo_model.training.world import COLOURS, RGB, SHAPES, Scene, things_scene

SCANS = Scans(torch.ones(20, 8, 8), [i % 10 for i in range(20)])
NAMES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


def names(scene: Scene) -> list[str]:
    """Of every thing, by colour as drawn rather than as planned: which of the six it is nearest to."""
    distance = [
        [sum((a - b) ** 2 for a, b in zip(thing.rgb, rgb, strict=True)) for rgb in RGB] for thing in scene.things
    ]
    return [f"{COLOURS[int(np.argmin(d))]} {SHAPES[t.shape]}" for d, t in zip(distance, scene.things, strict=True)]


def expected(question: Question, scenes: list[Scene]) -> str:
    """The answer, found from the words of the question and a list of (name, x)."""
    seen = [[(name, thing.x) for name, thing in zip(names(s), s.things, strict=True)] for s in scenes]
    words = question.text.rstrip("?").split()
    match question.kind:
        case Kind.DIGIT | Kind.TWO_DIGITS:
            return " and ".join(str(scene.digit.value) for scene in scenes if scene.digit is not None)
        case Kind.SHAPE:
            return f"A {seen[0][0][0].split()[1]}"
        case Kind.COLOUR | Kind.COLOUR_OF_ONE:
            [colour] = [name.split()[0] for name, _ in seen[0] if name.split()[1] == words[-1]]
            return colour.capitalize()
        case Kind.TOTAL:
            return NUMBERS[len(seen[0])]
        case Kind.COUNT_SHAPE | Kind.COUNT_KIND:
            asked = " ".join(words[2 : words.index("are")]).removesuffix("s")
            return NUMBERS[sum(asked in (name, name.split()[1]) for name, _ in seen[0])]
        case Kind.OUTERMOST:
            return f"A {(min if words[-1] == 'left' else max)(seen[0], key=lambda item: item[1])[0]}"
        case Kind.SIDE:
            [here] = [x for name, x in seen[0] if name.endswith(words[2])]
            [there] = [x for name, x in seen[0] if name.endswith(words[-1])]
            return "Left" if here < there else "Right"
        case Kind.TWO_MORE:
            return "The first" if len(seen[0]) > len(seen[1]) else "The second"
        case Kind.TWO_WHICH:
            asked = " ".join(words[words.index("a") + 1 :])
            [which] = [i for i, things in enumerate(seen) if any(name.endswith(asked) for name, _ in things)]
            return ("The first", "The second")[which]


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(list(Kind)), seed=st.integers(0, 2**32 - 1))
def test_answers_are_right(kind: Kind, seed: int) -> None:
    random = np.random.default_rng(seed)
    scenes = scenes_for(kind, SCANS, False, random)
    question = ask(kind, scenes, random)
    if question is not None:
        assert question.answer == expected(question, scenes)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_things_lie_inside_and_apart_and_keep_off_the_ground_colour(seed: int) -> None:
    scene = things_scene(np.random.default_rng(seed))
    short = min(scene.width_px, scene.height_px)
    places = [(t.x * scene.width_px / short, t.y * scene.height_px / short, t.radius) for t in scene.things]
    for i, (x, y, radius) in enumerate(places):
        assert radius * 0.99 <= x <= scene.width_px / short - radius * 0.99
        assert radius * 0.99 <= y <= scene.height_px / short - radius * 0.99
        assert all(np.hypot(x - a, y - b) > radius + r for a, b, r in places[:i])
    assert all(sum(abs(a - b) for a, b in zip(scene.ground.rgb, t.rgb, strict=True)) > 90 for t in scene.things)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_drawn_is_what_the_facts_say(seed: int) -> None:
    scene = things_scene(np.random.default_rng(seed))
    pixels, ink = draw([scene], SCANS.ink, 128, 128, np.random.default_rng(0))
    assert not ink.any()
    for thing in scene.things:
        at = pixels[0, :, int(thing.y * 128), int(thing.x * 128)]
        assert float((at - torch.tensor(thing.rgb)).abs().max()) < 1
    told = facts([scene])
    assert int(told.kinds.sum()) == int(told.total) == len(scene.things)
    kinds = told.centre[told.centre > 0].tolist()
    assert {NAMES[kind - 1] for kind in kinds} <= {thing.name for thing in scene.things}


def test_held_out_digits_are_never_trained_on() -> None:
    trained, held_out = set(SCANS.numbers(False)), set(SCANS.numbers(True))
    assert trained.isdisjoint(held_out)
    assert trained | held_out == set(range(20))
    random = np.random.default_rng(0)
    for kind in ABOUT_DIGITS:
        drawn = [scene for _ in range(30) for scene in scenes_for(kind, SCANS, True, random)]
        assert {scene.digit.scan for scene in drawn if scene.digit is not None} <= held_out


def test_a_scene_is_drawn_the_same_whatever_the_batch() -> None:
    random = np.random.default_rng(4)
    scenes = [s for kind in (Kind.TOTAL, Kind.DIGIT) for _ in range(4) for s in scenes_for(kind, SCANS, False, random)]
    quiet = [s for s in scenes if not s.ground.grain]
    together, _ = draw(quiet, SCANS.ink, 96, 64, random)
    for scene, pixels in zip(quiet, together, strict=True):
        torch.testing.assert_close(draw([scene], SCANS.ink, 96, 64, random)[0][0], pixels, atol=1e-3, rtol=0)
