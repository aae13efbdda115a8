"""Who makes which picture next: the order of the jobs that wait, and whom each goes to. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator

from airside.controller.vision.pixel_jobs import ImageKey, PixelJob

PATIENCE = 4.0
"""A job lets those pass it that come within so many times the seconds it takes itself."""


class JobQueue:
    """Jobs of known size that wait for a vision worker, in the order of their turns.

    A job's turn is the time at which it became known, put off by `PATIENCE` times the seconds that it takes. Small ones
    pass large ones so, but only those that come before a large one has waited for its own share: nobody starves.
    """

    def __init__(self) -> None:
        self._order: list[tuple[float, ImageKey]] = []
        self._jobs: dict[ImageKey, PixelJob] = {}

    def add(self, job: PixelJob) -> None:
        """`job.due` must be set, and stays as it is while the job waits here."""
        bisect.insort(self._order, (job.due, job.name))
        self._jobs[job.name] = job

    def remove(self, job: PixelJob) -> None:
        """It must be here."""
        at = bisect.bisect_left(self._order, (job.due, job.name))
        assert self._order[at] == (job.due, job.name), job.name
        del self._order[at], self._jobs[job.name]

    def __contains__(self, job: PixelJob) -> bool:
        return self._jobs.get(job.name) is job

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[PixelJob]:
        """In the order of their turns, as it is now, whatever is removed meanwhile."""
        return (self._jobs[name] for _, name in self._order.copy())


def turn(known_at: float, predicted_s: float) -> float:
    """When a job is due."""
    return known_at + PATIENCE * predicted_s


def place(
    jobs: Iterable[PixelJob],
    open_to: list[str],
    may_take: Callable[[str, PixelJob], bool],
    load: Callable[[str], tuple[float, ...]],
) -> Iterator[tuple[PixelJob, str]]:
    """Which job goes to whom: in order, each to the least loaded worker that may take it.

    Nobody waits for a job that no worker may take now (it wants one to itself, say); but the least loaded worker is
    struck off `open_to`, so that it becomes free for that job. The caller hands out each pair before it asks for the
    next one.
    """
    if not open_to:
        return
    for job in jobs:
        able = [name for name in open_to if may_take(name, job)]
        if able:
            yield job, min(able, key=load)
        else:
            open_to.remove(min(open_to, key=load))
        if not open_to:
            return
