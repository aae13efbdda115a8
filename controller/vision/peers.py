"""The vision workers, and what each has in hand. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from airside.controller.vision.pixel_jobs import JobState, PixelJob
from airside.proto.work_marks import JobKey

WINDOW_PIXELS = 1_000_000
"""A worker gets a second job only while those in its hand have no more pixels together, some hundredths of a second of
work: more would only wait there while another worker becomes free."""

PROBES_MAX = 64
"""Files whose headers one worker is asked for at a time: far fewer than its outbox has room for."""

FETCHES_MAX = 64
"""The same for pictures that are fetched first; a worker fetches as many at once."""


SETTLED_MAX = 256
"""Jobs that are remembered, so that a message which comes twice does not give a slab back twice."""


@dataclass(slots=True, eq=False)
class VisionPeer:
    """One vision worker."""

    name: str
    segment: str
    segment_bytes: int  # 0: it did not say
    shares_memory: bool = True  # with the ranks; else its pixels come as frames, and the segment is but a name
    credits: int = 0
    uncredited: int = 0  # jobs that have ended, and whose credit is on its way
    cancelled: int = 0  # jobs that it was told to drop, and may be busy with still: their credits have not come
    is_draining: bool = False  # gets nothing more, whatever credits it has and gives
    jobs: dict[JobKey, PixelJob] = field(default_factory=dict)  # in hand, in the order they were given
    # Headers it was asked for, in that order; also those that nobody wants any more, since it looks into them still.
    probes: dict[JobKey, PixelJob] = field(default_factory=dict)
    fetches: dict[JobKey, PixelJob] = field(default_factory=dict)  # files it was asked for
    untouched: set[JobKey] = field(default_factory=set)  # of all these, what it has not looked into: it is gone
    was_counting: bool = False  # at its end it may have been at a header of no job
    jobs_done: int = 0
    # When it last had nothing to do before it got a job, or told of the end of one, or that one waits for room.
    progress_at: float = 0.0
    room_wanted: int = 0  # bytes that the oldest job waits for; 0: it does not
    was_helped: bool = False  # it got room, or its oldest job was taken from it, since it last said that it waits
    settled: deque[JobKey] = field(default_factory=lambda: deque(maxlen=SETTLED_MAX))  # whose pixels were seen to

    @property
    def oldest(self) -> PixelJob | None:
        """The job that it has had in hand for longest: it takes them one after the other."""
        return next(iter(self.jobs.values()), None)

    @property
    def at_work(self) -> list[PixelJob]:
        """The jobs in hand that are not made yet, in that order; the oldest one is, when it waits for room."""
        return list(self.jobs.values())[1 if self.room_wanted else 0 :]

    @property
    def num_busy(self) -> int:
        """Jobs that it may be busy with."""
        return len(self.at_work) + self.cancelled

    @property
    def pixels_in_hand(self) -> int:
        """Of all jobs in hand."""
        return sum(job.pixels for job in self.jobs.values())

    def may_take(self, job: PixelJob) -> bool:
        """Whether it can be given this job now, and is done with all that it has in hand soon."""
        return self.can_take(job) and (not self.jobs or self.pixels_in_hand + job.pixels <= WINDOW_PIXELS)

    def can_take(self, job: PixelJob) -> bool:
        """Whether it can be given this job now.

        A suspect is tried alone: its neighbours would be lost with it once more, and if it is to blame must be certain.
        """
        if self.is_draining or not self.credits or self.room_wanted or self._has_suspect:
            return False
        return not job.is_suspect or not (self.num_busy or self.probes)

    def give(self, job: PixelJob, now: float) -> None:
        """It has the job. `can_take` must be true."""
        assert self.can_take(job), job.name
        if not self.num_busy:
            self.progress_at = now
        self.jobs[job.key] = job
        self.credits -= 1

    def finish(self, job: PixelJob, now: float) -> None:
        """It has told of the end of a job."""
        self._drop(job)
        self.progress_at = now
        self.jobs_done += 1
        self.uncredited += 1

    def cancel(self, job: PixelJob) -> None:
        """It is told to drop a job or a fetch, or its answer to a probe counts no more."""
        if job.key in self.jobs:
            self._drop(job)
            self.cancelled += 1
        self.fetches.pop(job.key, None)

    def _drop(self, job: PixelJob) -> None:
        if self.oldest is job and self.room_wanted:
            self.room_wanted, self.was_helped = 0, True
        del self.jobs[job.key]

    def credit(self, jobs: int, now: float) -> None:
        """It can take so many more: some to begin with, then one for each that ended, or was dropped, in its turn."""
        self.credits += jobs
        ended = min(jobs, self.uncredited)
        self.uncredited -= ended
        dropped = min(jobs - ended, self.cancelled)
        if dropped:
            self.cancelled -= dropped
            self.progress_at = now

    def drain(self) -> None:
        """It is asked to leave. What it is busy with still, it goes on to tell by its credits."""
        self.is_draining = True

    def may_probe(self, job: PixelJob) -> bool:
        """Whether it can be asked for this picture's header now. Suspects alone, as with jobs."""
        if self.is_draining or self._has_suspect:
            return False
        if job.is_suspect:
            return not self.num_busy and not self.probes
        return len(self.probes) < PROBES_MAX

    def may_fetch(self) -> bool:
        """Whether it can be asked for another file. That is harmless: nobody looks into files as they come."""
        return not self.is_draining and len(self.fetches) < FETCHES_MAX

    @property
    def _has_suspect(self) -> bool:
        return any(job.is_suspect for job in (*self.at_work, *self.probes.values()))

    def held(self) -> list[PixelJob]:
        """All that it was asked for, has not answered, and that somebody still wants."""
        probes = [job for job in self.probes.values() if job.state is not JobState.OVER]
        return [*self.jobs.values(), *probes, *self.fetches.values()]

    def overdue(self, now: float, job_s: float, fetch_s: float) -> list[PixelJob]:
        """What it has had in hand for longer than it may: `job_s`, or `fetch_s` for a fetch."""
        oldest = self.at_work[:1] if now - self.progress_at > job_s else []
        probes = [job for job in self.probes.values() if now - job.probed_at > job_s]
        fetches = [job for job in self.fetches.values() if now - job.probed_at > fetch_s]
        return [*oldest, *probes[:1], *fetches]

    def is_stuck(self, now: float, job_s: float, fetch_s: float) -> bool:
        """Whether anything is overdue, be it a job that was cancelled."""
        is_late = bool(self.jobs or self.cancelled) and now - self.progress_at > job_s
        return is_late or bool(self.overdue(now, job_s, fetch_s))

    def suspects(self, now: float, job_s: float, fetch_s: float) -> list[PixelJob]:
        """On whom its loss is to be blamed: on what is overdue, or else on what it was working on.

        That is a job or a header; if it may have been either, or a job that was cancelled, or a header that is only
        counted, nobody is blamed: they are tried alone next.
        """
        late = self._touched(self.overdue(now, job_s, fetch_s))
        overdue = [job for job in late if not self.cancelled or job.key not in self.jobs]
        jobs, probes = self._touched(self.at_work), self._touched(self.probes.values())
        at_work = [*jobs[:1], *probes[:1]]
        is_certain = len(at_work) == 1 and not self.cancelled and not self.was_counting
        blamed = overdue or (at_work if is_certain else [])
        return [job for job in blamed if job.state is not JobState.OVER]

    def was_at(self, keys: Collection[JobKey]) -> None:
        """It has looked into nothing else at its end: the rest was done, or waited, as for one that was stopped."""
        self.untouched |= {*self.jobs, *self.probes}.difference(keys)

    def _touched(self, jobs: Iterable[PixelJob]) -> list[PixelJob]:
        """Those that it may have seen. One that is gone and had nothing to do gets a job before anybody knows."""
        return [job for job in jobs if job.key not in self.untouched]

    @property
    def state(self) -> str:
        """ "draining", "busy" or "ready"."""
        return "draining" if self.is_draining else "busy" if self.jobs else "ready"


class VisionPeers:
    """All vision workers by name, in the order they joined."""

    def __init__(self) -> None:
        self._peers: dict[str, VisionPeer] = {}

    def join(self, peer: VisionPeer) -> None:
        """`peer.name` must not be a live worker's."""
        assert peer.name not in self._peers, peer.name
        self._peers[peer.name] = peer

    def leave(self, name: str) -> VisionPeer | None:
        """The worker is gone; None when it was not here."""
        return self._peers.pop(name, None)

    def get(self, name: str | None) -> VisionPeer | None:
        """The worker of this name."""
        return None if name is None else self._peers.get(name)

    def __getitem__(self, name: str) -> VisionPeer:
        return self._peers[name]

    def __iter__(self) -> Iterator[VisionPeer]:
        return iter(self._peers.values())

    def takers(self) -> list[str]:
        """Names of those that take jobs: here, and not asked to leave."""
        return [peer.name for peer in self if not peer.is_draining]

    def owner_of(self, segment: str) -> VisionPeer | None:
        """Who allocates in this segment, if it is here."""
        return next((peer for peer in self if peer.segment == segment), None)
