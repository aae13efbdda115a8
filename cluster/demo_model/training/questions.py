"""What can be asked about scenes, and the right answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from airside.cluster.demo_model.training.scans import Scans
from airside.cluster.demo_model.training.world import COLOURS, SHAPES, Random, Scene, digit_scene, things_scene

NUMBERS = ("Zero", "One", "Two", "Three", "Four")


class Kind(StrEnum):
    """The kinds of question, as a table of results names them."""

    DIGIT = "digit"
    SHAPE = "shape of the one object"
    COLOUR_OF_ONE = "colour of the one object"
    COLOUR = "colour of one among others"
    TOTAL = "how many shapes"
    COUNT_SHAPE = "how many of one shape"
    COUNT_KIND = "how many of one colour and shape"
    OUTERMOST = "what is on the left or right"
    SIDE = "left or right of another"
    TWO_DIGITS = "digits in two pictures"
    TWO_WHICH = "which of two pictures shows it"
    TWO_MORE = "which of two pictures shows more"


ABOUT_DIGITS = (Kind.DIGIT, Kind.TWO_DIGITS)
ABOUT_TWO = (Kind.TWO_DIGITS, Kind.TWO_WHICH, Kind.TWO_MORE)

# What the shipped model answers right at least nine times out of ten: what may be shown.
SHOWN = (
    Kind.DIGIT,
    Kind.SHAPE,
    Kind.COLOUR_OF_ONE,
    Kind.COLOUR,
    Kind.TOTAL,
    Kind.COUNT_SHAPE,
    Kind.OUTERMOST,
    Kind.TWO_DIGITS,
    Kind.TWO_WHICH,
    Kind.TWO_MORE,
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question and the one answer that counts as right."""

    kind: Kind
    text: str
    answer: str


def ask(kind: Kind, scenes: list[Scene], random: Random) -> Question | None:
    """A question of this kind about one or two scenes; None where they don't allow one."""
    asked = _ASKERS[kind](scenes, random)
    return None if asked is None else Question(kind, *asked)


def scenes_for(kind: Kind, scans: Scans, held_out: bool, random: Random) -> list[Scene]:
    """Scenes to try a question of this kind on."""
    number = 2 if kind in ABOUT_TWO else 1
    if kind in ABOUT_DIGITS:
        chosen = random.choice(scans.numbers(held_out), number)
        return [digit_scene(random, int(scan), scans.values[scan]) for scan in chosen]
    if kind in (Kind.SHAPE, Kind.COLOUR_OF_ONE):
        return [things_scene(random, 1)]
    return [things_scene(random) for _ in range(number)]


def _digit(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    digit = scenes[0].digit
    if digit is None:
        return None
    return _one_of(random, "What digit is this?", "Which digit is in the picture?"), str(digit.value)


def _shape(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    if len(scenes[0].things) != 1:
        return None
    text = _one_of(random, "What shape is this?", "Which shape is in the picture?")
    return text, f"A {SHAPES[scenes[0].things[0].shape]}"


def _colour_of_one(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    return _colour(scenes, random) if len(scenes[0].things) == 1 else None


def _colour_among_others(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    return _colour(scenes, random) if len(scenes[0].things) > 1 else None


def _colour(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    alone = [thing for shape in range(len(SHAPES)) if (thing := scenes[0].only(shape)) is not None]
    if not alone:
        return None
    thing = alone[int(random.integers(len(alone)))]
    spelt = _one_of(random, "colour", "color")
    return f"What {spelt} is the {SHAPES[thing.shape]}?", COLOURS[thing.colour].capitalize()


def _total(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    if not scenes[0].things:
        return None
    return _how_many(random, "shape", len(scenes[0].things))


def _count_shape(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    if not scenes[0].things:
        return None
    shape = _weighted(random, [scenes[0].count(shape) for shape in range(len(SHAPES))])
    return _how_many(random, SHAPES[shape], scenes[0].count(shape))


def _count_kind(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    """About a kind that is there, or one that shares its colour or its shape with something there."""
    things = scenes[0].things
    if not things:
        return None
    kinds = [(colour, shape) for colour in range(len(COLOURS)) for shape in range(len(SHAPES))]
    colours, shapes = {thing.colour for thing in things}, {thing.shape for thing in things}
    near = [kind for kind in kinds if kind[0] in colours or kind[1] in shapes]
    counts = [scenes[0].count(shape, colour) for colour, shape in near]
    chosen = _weighted(random, counts)
    colour, shape = near[chosen]
    return _how_many(random, f"{COLOURS[colour]} {SHAPES[shape]}", counts[chosen])


def _outermost(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    side = _one_of(random, "left", "right")
    thing = scenes[0].outermost(side)
    return None if thing is None else (f"What is on the {side}?", f"A {thing.name}")


def _side(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    shapes = [shape for shape in range(len(SHAPES)) if scenes[0].only(shape) is not None]
    pairs = [(a, b, side) for a in shapes for b in shapes if a != b and (side := scenes[0].side_of(a, b)) is not None]
    if not pairs:
        return None
    shape, other, side = pairs[int(random.integers(len(pairs)))]
    return f"Is the {SHAPES[shape]} left or right of the {SHAPES[other]}?", side.capitalize()


def _two_digits(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    if len(scenes) != 2 or scenes[0].digit is None or scenes[1].digit is None:
        return None
    text = _one_of(random, "Which digits are in the two pictures?", "What digits are these?")
    return text, f"{scenes[0].digit.value} and {scenes[1].digit.value}"


def _two_which(scenes: list[Scene], random: Random) -> tuple[str, str] | None:
    if len(scenes) != 2 or not all(scene.things for scene in scenes):
        return None
    names = [{thing.name for thing in scene.things} | {SHAPES[t.shape] for t in scene.things} for scene in scenes]
    differing = sorted(names[0] ^ names[1])
    if not differing:
        return None
    name = differing[int(random.integers(len(differing)))]
    return f"Which picture shows a {name}?", "The first" if name in names[0] else "The second"


def _two_more(scenes: list[Scene], _random: Random) -> tuple[str, str] | None:
    if len(scenes) != 2 or not all(scene.things for scene in scenes):
        return None
    first, second = (len(scene.things) for scene in scenes)
    if first == second:
        return None
    return "Which picture shows more shapes?", "The first" if first > second else "The second"


def _how_many(random: Random, name: str, number: int) -> tuple[str, str]:
    text = _one_of(random, "How many {}s are there?", "How many {}s are in the picture?")
    return text.format(name), NUMBERS[number]


def _weighted(random: Random, counts: list[int]) -> int:
    """An index; larger counts more often, so that all answers come up, and a quarter of the time a count of none."""
    none = [i for i, count in enumerate(counts) if count == 0]
    if none and random.random() < 0.22:
        return int(random.choice(none))
    weights = [count**2 for count in counts]
    return int(random.choice(len(counts), p=[weight / sum(weights) for weight in weights]))


def _one_of(random: Random, *texts: str) -> str:
    return texts[int(random.integers(len(texts)))]


_ASKERS: dict[Kind, Callable[[list[Scene], Random], tuple[str, str] | None]] = {
    Kind.DIGIT: _digit,
    Kind.SHAPE: _shape,
    Kind.COLOUR_OF_ONE: _colour_of_one,
    Kind.COLOUR: _colour_among_others,
    Kind.TOTAL: _total,
    Kind.COUNT_SHAPE: _count_shape,
    Kind.COUNT_KIND: _count_kind,
    Kind.OUTERMOST: _outermost,
    Kind.SIDE: _side,
    Kind.TWO_DIGITS: _two_digits,
    Kind.TWO_WHICH: _two_which,
    Kind.TWO_MORE: _two_more,
}
