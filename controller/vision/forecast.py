"""How long a picture keeps a vision worker busy: a line through what was measured lately. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

_KEPT = 0.95  # of the weight of all measurements, with each new one: the last twenty decide

# What is believed before anything was measured: (weight, pixels, seconds). A measurement has the weight 1.
_PRIOR = ((0.2, 0.0, 0.005), (0.2, 12e6, 0.6))

_PIXELS_AT_FIRST = 1e6  # of a picture of which nothing is known, until some were


class Forecast:
    """Seconds as `overhead + pixels * rate`, by least squares in which a measurement's weight fades with its age.

    Small pictures are mostly overhead: some families blow them up to a fixed size. So a rate alone, of one kind of
    picture, would be far off for the other.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = 0.0  # weighted sums; x: pixels, y: seconds

    def note(self, pixels: int, seconds: float) -> None:
        """One picture of this size took so long, decoding included. What is no time is left out."""
        if not math.isfinite(seconds):
            return
        x, y = float(pixels), max(seconds, 0.0)
        self._weight = self._weight * _KEPT + 1
        self._x = self._x * _KEPT + x
        self._y = self._y * _KEPT + y
        self._xx = self._xx * _KEPT + x * x
        self._xy = self._xy * _KEPT + x * y

    def seconds(self, pixels: float) -> float:
        """For a picture of this size."""
        overhead, rate = self._line()
        return overhead + rate * pixels

    def seconds_of(self, pixels: Iterable[float]) -> float:
        """For pictures of these sizes, one after the other."""
        overhead, rate = self._line()
        return sum(overhead + rate * each for each in pixels)

    @property
    def pixels_usual(self) -> float:
        """Of a picture of which nothing is known yet."""
        return self._x / self._weight if self._weight else _PIXELS_AT_FIRST

    def _line(self) -> tuple[float, float]:
        """Overhead in seconds, and seconds per pixel; neither is negative."""
        w = self._weight + sum(weight for weight, _, _ in _PRIOR)
        sx = self._x + sum(weight * x for weight, x, _ in _PRIOR)
        sy = self._y + sum(weight * y for weight, _, y in _PRIOR)
        sxx = self._xx + sum(weight * x * x for weight, x, _ in _PRIOR)
        sxy = self._xy + sum(weight * x * y for weight, x, y in _PRIOR)
        rate = max((w * sxy - sx * sy) / (w * sxx - sx * sx), 0.0)  # the prior's two sizes keep the divisor positive
        overhead = (sy - rate * sx) / w
        if overhead < 0:  # then the line goes through the origin
            return 0.0, sxy / sxx
        return overhead, rate
