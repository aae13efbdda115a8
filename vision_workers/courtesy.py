"""How much of the processors the making of pictures takes: what others leave, unless they leave next to nothing.

Being "nice" is not enough beside a rank that computes in many short bursts: a nice thread is let run on for
milliseconds after the rank has woken up. An idle one (sched(7), SCHED_IDLE) makes room at once.
"""

from __future__ import annotations

import os

FAIR_S = 10.0
"""So long a thread that was starved takes its fair share, before it steps back again."""

_STARVED_S = 1.0
_STARVED_SHARE = 0.1


def step_back() -> None:
    """From now on this thread runs when no other wants to. Without privileges there is no way back."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def was_starved(passed_s: float, computed_s: float) -> bool:
    """Whether a thread that had something to compute was let do so for next to none of the time."""
    return passed_s > _STARVED_S and computed_s < _STARVED_SHARE * passed_s
