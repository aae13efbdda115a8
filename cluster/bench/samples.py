"""What is told of many measurements of one thing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

median = statistics.median


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of 100 samples do not exceed; between two samples, on the line between them.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a percentile of no samples")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
