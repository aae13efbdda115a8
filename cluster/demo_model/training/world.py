"""The world that the demo model knows: what can be in a picture. Sizes are fractions of the picture's short side."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
RGB = ((215, 30, 35), (30, 150, 50), (35, 70, 215), (245, 220, 30), (135, 40, 165), (18, 18, 20))
SHAPES = ("circle", "square", "triangle")
THINGS_MAX = 4
SHORT_SIDE_PX = (32, 1000)
LONG_SIDE_PX_MAX = 1500
APART = 1.2  # two things' centres are this many times their radii's sum apart
CLEARLY = 0.1  # of the width: two things this far apart are left and right of each other
TURN_MAX = 0.22  # radians either way

Random = np.random.Generator
Colour = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Thing:
    """One circle, square or triangle; `x`, `y` are its centre as fractions of width and height."""

    colour: int
    shape: int
    x: float
    y: float
    radius: float
    turn: float
    rgb: Colour

    @property
    def name(self) -> str:
        """For example "red circle"."""
        return f"{COLOURS[self.colour]} {SHAPES[self.shape]}"


@dataclass(frozen=True, slots=True)
class Digit:
    """One handwritten digit: scan number `scan`, its 8x8 square `side` of the short side."""

    scan: int
    value: int
    x: float
    y: float
    side: float
    turn: float
    slant: float
    sharpness: float
    rgb: Colour


@dataclass(frozen=True, slots=True)
class Ground:
    """What lies behind: `rgb` to `rgb_far` along the direction `turn`, with grains of so many grey levels."""

    rgb: Colour
    rgb_far: Colour
    turn: float
    grain: float


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture before it is drawn: either things or one digit."""

    width_px: int
    height_px: int
    ground: Ground
    things: tuple[Thing, ...] = ()
    digit: Digit | None = None

    def count(self, shape: int | None = None, colour: int | None = None) -> int:
        """How many things there are of a shape, of a colour, of both."""
        return sum(shape in (None, thing.shape) and colour in (None, thing.colour) for thing in self.things)

    def only(self, shape: int) -> Thing | None:
        """The one thing of this shape; None if there are none or several."""
        found = [thing for thing in self.things if thing.shape == shape]
        return found[0] if len(found) == 1 else None

    def outermost(self, side: str) -> Thing | None:
        """The thing furthest to the "left" or "right", if there are two or more and it is clearly the one."""
        order = sorted(self.things, key=lambda thing: thing.x, reverse=side == "right")
        if len(order) < 2 or abs(order[0].x - order[1].x) < CLEARLY:
            return None
        return order[0]

    def side_of(self, shape: int, other: int) -> str | None:
        """On which side of the only `other` the only `shape` is; None unless both are alone of their kind and apart."""
        here, there = self.only(shape), self.only(other)
        if here is None or there is None or abs(here.x - there.x) < CLEARLY:
            return None
        return "left" if here.x < there.x else "right"


def picture_size(random: Random) -> tuple[int, int]:
    """Width and height in pixels: small to large, upright to wide."""
    low, high = SHORT_SIDE_PX
    short = int(low * (high / low) ** random.random())
    long = min(LONG_SIDE_PX_MAX, int(short * random.choice([1.0, random.uniform(1, 1.6)])))
    return (long, short) if random.random() < 0.5 else (short, long)


def things_scene(random: Random, number: int | None = None, shapes: tuple[int, ...] = (0, 1, 2)) -> Scene:
    """A scene of 1 to `THINGS_MAX` things of `shapes` that do not touch."""
    number = int(random.choice(THINGS_MAX, p=[0.18, 0.28, 0.27, 0.27])) + 1 if number is None else number
    width, height = picture_size(random)
    kinds = _kinds(random, number, shapes)
    for _ in range(100):
        things = _placed(random, kinds, width, height)
        if things is not None:
            avoid = [RGB[colour] for colour, _ in kinds]
            return Scene(width, height, _ground(random, avoid), tuple(things))
    return things_scene(random, number, shapes)


def digit_scene(random: Random, scan: int, value: int) -> Scene:
    """A scene of one digit anywhere, a third of the short side or larger."""
    width, height = picture_size(random)
    short = min(width, height)
    side = random.uniform(min(0.9, max(0.32, 22 / short)), 1.0)
    free_x, free_y = width / short - side, height / short - side
    x = (side / 2 + random.random() * free_x) * short / width
    y = (side / 2 + random.random() * free_y) * short / height
    dark, light = random.uniform(0, 75), random.uniform(170, 255)
    ink, paper = (dark, light) if random.random() < 0.6 else (light, dark)
    grain = random.uniform(2, 12) if random.random() < 0.35 else 0.0
    paper_rgb = _tinted(random, paper, 14)
    digit = Digit(
        scan=scan,
        value=value,
        x=x,
        y=y,
        side=side,
        turn=random.uniform(-0.26, 0.26),
        slant=random.uniform(-0.1, 0.1),
        sharpness=random.uniform(1.3, 2.5) if random.random() < 0.35 else 1.0,
        rgb=_tinted(random, ink, 40),
    )
    return Scene(width, height, Ground(paper_rgb, paper_rgb, 0.0, grain), digit=digit)


def _kinds(random: Random, number: int, shapes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Colour and shape of each thing; repeats are frequent, so that there is something to count."""
    kinds: list[tuple[int, int]] = []
    alike = random.choice([0.3, 0.5, 0.85])
    for _ in range(number):
        lot = random.random() / alike
        colour, shape = int(random.integers(len(COLOURS))), int(random.choice(shapes))
        if kinds and lot < 1:
            known = kinds[int(random.integers(len(kinds)))]
            colour, shape = known if lot < 0.7 else (colour, known[1])
        kinds.append((colour, shape))
    return kinds


def _placed(random: Random, kinds: list[tuple[int, int]], width: int, height: int) -> list[Thing] | None:
    """Things at random places, or None where one found no room."""
    short = min(width, height)
    smallest = max(0.1, 5 / short)
    largest = max(smallest, (0.36, 0.25, 0.2, 0.18)[len(kinds) - 1])
    things: list[Thing] = []
    for colour, shape in kinds:
        for _ in range(30):
            radius = random.uniform(smallest, largest)
            x = random.uniform(radius, width / short - radius)
            y = random.uniform(radius, height / short - radius)
            if all(
                math.hypot(x - other.x * width / short, y - other.y * height / short) > APART * (radius + other.radius)
                for other in things
            ):
                rgb = _near(random, RGB[colour], 16)
                turn = random.uniform(-TURN_MAX, TURN_MAX)
                things.append(Thing(colour, shape, x * short / width, y * short / height, radius, turn, rgb))
                break
        else:
            return None
    return things


def _ground(random: Random, avoid: list[tuple[int, int, int]]) -> Ground:
    """Plain, shaded or grainy, in a grey or pale colour that keeps its distance from the colours in `avoid`."""
    rgb: Colour = (250.0, 250.0, 250.0)
    for _ in range(60):
        tried = (
            _tinted(random, random.uniform(70, 255), 14)
            if random.random() < 0.6
            else _near(random, (200, 200, 200), 55)
        )
        if all(sum(abs(a - b) for a, b in zip(tried, other, strict=True)) > 160 for other in avoid):
            rgb = tried
            break
    far = _near(random, rgb, 20) if random.random() < 0.4 else rgb
    return Ground(rgb, far, random.uniform(0, 2 * math.pi), random.uniform(2, 14) if random.random() < 0.35 else 0.0)


def _tinted(random: Random, grey: float, by: float) -> Colour:
    return _near(random, (grey, grey, grey), by)


def _near(random: Random, rgb: tuple[float, float, float], by: float) -> Colour:
    red, green, blue = (float(min(255, max(0, value + random.uniform(-by, by)))) for value in rgb)
    return red, green, blue
