"""Who makes which picture: the jobs, the vision workers, and what passes between them. Pure.

A new job goes to a worker as a `Probe`, at once and without credit, and comes back with its size, or with its file, of
which another `Probe` is made; then it waits for its turn and for a worker with credit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from airside.controller.vision.effects import Effect, Send
from airside.controller.vision.forecast import Forecast
from airside.controller.vision.job_book import JobBook
from airside.controller.vision.job_queue import place, turn
from airside.controller.vision.peers import VisionPeer, VisionPeers
from airside.controller.vision.pixel_cache import PixelCache
from airside.controller.vision.pixel_jobs import JobState, KnownShape, PixelJob
from airside.proto import messages as msg
from airside.proto.work_marks import JobKey

WITNESSED_MAX = 4
"""A picture that was in the hands of so many times `attempts_max` lost workers is refused whoever was blamed."""


@dataclass(frozen=True, slots=True)
class VisionLimits:
    """What images and vision workers are held to."""

    attempts_max: int = 3  # vision workers that may be lost to one picture before it is refused
    job_s: float = 20.0  # the longest that a worker may have one picture in hand
    fetch_s: float = 30.0  # the longest that it may take to fetch one
    bytes_max: int = 512 * 2**20  # of files that wait
    file_bytes_max: int = 20 * 2**20  # of one that is fetched, whose size nobody knows before
    cache_bytes: int = 0  # of slabs kept for the next equal picture


class VisionDispatch:
    """Jobs on their way to vision workers and back.

    Args:
        cache: asked for how full a worker's segment is.
    """

    def __init__(self, limits: VisionLimits, cache: PixelCache) -> None:
        self.jobs = JobBook()
        self.peers = VisionPeers()
        self._limits = limits
        self._cache = cache
        self._forecast = Forecast()

    # --- jobs -----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Effect]:
        """Asks for files and sizes and gives out jobs, as far as there are workers for them."""
        takers = self.peers.takers()
        return [*self._fetch(takers, now), *self._hand_out(takers, now)] if takers and len(self.jobs) else []

    def cancel(self, job: PixelJob) -> list[Effect]:
        """Nobody wants its pixels any more."""
        peer, is_sent = self.peers.get(job.worker), job.state in (JobState.PROCESSING, JobState.FETCHING)
        self.jobs.close(job)
        if peer is None:
            return []
        peer.cancel(job)
        return [Send(peer.name, msg.Cancel(*job.key))] if is_sent else []

    def move(self, job: PixelJob, now: float) -> list[Effect]:
        """Gives a job that waits for room to a worker that has it; once, for its room may be in pieces.

        Also to one that has others in hand: amid many requests no worker is idle for long.
        """
        peer = self.peers.get(job.worker)
        assert peer is not None, job.name
        able = [other for other in self.peers if other.can_take(job)]
        roomy = [o.name for o in able if o.segment_bytes - self._cache.used_bytes(o.segment) >= peer.room_wanted]
        if job.was_moved or not roomy:
            return []
        cancel = Send(peer.name, msg.Cancel(*job.key))
        peer.cancel(job)
        self.jobs.put_back(job)
        job.was_moved = True
        return [cancel, self._give(job, self.peers[min(roomy, key=self._work_at)], now), *self.advance(now)]

    # --- what vision workers say ----------------------------------------------------------------------------------

    def credit(self, name: str, jobs: int, now: float) -> None:
        """The worker can take `jobs` more; a draining one has only got on by so many. Unknown ones are fine."""
        peer = self.peers.get(name)
        if peer is not None and jobs > 0:
            peer.credit(jobs, now)

    def fetched(self, name: str, key: JobKey) -> PixelJob | None:
        """The job whose file a worker sends, or why not; None when its word is stale."""
        peer = self.peers.get(name)
        return None if peer is None else peer.fetches.pop(key, None)

    def probed(self, name: str, key: JobKey) -> PixelJob | None:
        """The job whose size a worker tells, or why not; None when its word is stale."""
        peer = self.peers.get(name)
        job = None if peer is None else peer.probes.pop(key, None)
        return None if job is None or job.state is JobState.OVER else job

    def know(self, job: PixelJob, shape: KnownShape, now: float) -> None:
        """Its size is known: it waits for its turn. A suspect, which has waited before, comes first."""
        due = 0.0 if job.is_suspect else turn(now, self._forecast.seconds(shape.pixels))
        self.jobs.enqueue(job, shape, due)

    def made(self, name: str, key: JobKey, now: float) -> PixelJob | None:
        """The job whose end a worker tells; None when its word is stale. It is out of the worker's hand."""
        peer = self.peers.get(name)
        job = None if peer is None else peer.jobs.get(key)
        if peer is None or job is None:
            return None
        peer.finish(job, now)
        return job

    def is_news(self, name: str, key: JobKey) -> bool:
        """Whether this is the first message with pixels for a job. From then on it was."""
        peer = self.peers.get(name)
        if peer is None or key in peer.settled:
            return False
        peer.settled.append(key)
        return True

    def measured(self, job: PixelJob, seconds: float) -> None:
        """So long it took to make."""
        self._forecast.note(job.pixels, seconds)

    # --- vision workers -------------------------------------------------------------------------------------------

    def lose(self, peer: VisionPeer, now: float) -> list[PixelJob]:
        """The worker is gone. What it had in hand waits for others; returns those that have had their last attempt."""
        for job in peer.suspects(now, self._limits.job_s, self._limits.fetch_s):
            job.blamed += 1
        jobs = peer.held()
        for job in jobs:
            job.witnessed += job.state is not JobState.FETCHING and job.key not in peer.untouched
            self.jobs.put_back(job)
        return [job for job in jobs if self._is_given_up(job)]

    def _is_given_up(self, job: PixelJob) -> bool:
        """Whether too many workers were lost to it, or, though it was blamed on others, so many with it."""
        most = self._limits.attempts_max
        return job.blamed >= most or job.witnessed >= WITNESSED_MAX * most

    def stuck(self, now: float) -> list[str]:
        """Workers that have had one thing in hand for too long."""
        return [peer.name for peer in self.peers if peer.is_stuck(now, self._limits.job_s, self._limits.fetch_s)]

    # --- what others may ask --------------------------------------------------------------------------------------

    @property
    def num_in_hand(self) -> int:
        """Pictures that are being made."""
        return sum(len(peer.jobs) for peer in self.peers)

    @property
    def bytes_claimed(self) -> int:
        """Of the files that wait, and what those may take that are being fetched."""
        return self.jobs.num_bytes + sum(len(peer.fetches) for peer in self.peers) * self._limits.file_bytes_max

    def load(self, now: float) -> msg.VisionLoad:
        """How long a picture that came now would wait."""
        usual = self._forecast.pixels_usual
        left_s = self._forecast.seconds_of(job.pixels or usual for job in self.jobs)
        for peer in self.peers:
            if peer.oldest is not None:
                left_s -= min(max(now - peer.progress_at, 0.0), self._forecast.seconds(peer.oldest.pixels))
        in_hand, workers = self.num_in_hand, len(self.peers.takers())
        return msg.VisionLoad(len(self.jobs) - in_hand, in_hand, workers, max(left_s, 0.0) / max(workers, 1))

    def check(self) -> None:
        """Asserts every invariant."""
        self.jobs.check()
        in_hand = [(peer.name, job) for peer in self.peers for job in peer.held()]
        assert all(job.worker == name for name, job in in_hand)
        assert len(in_hand) == sum(job.worker is not None for job in self.jobs)
        assert not any(self._is_given_up(job) for job in self.jobs)
        assert all(peer.credits >= 0 for peer in self.peers)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _fetch(self, takers: Sequence[str], now: float) -> Iterator[Effect]:
        """What is fetched must find room here, whatever size it turns out to have."""
        for job in self.jobs.remote():
            claimed, most = self.bytes_claimed, self._limits.bytes_max
            able = [self.peers[name] for name in takers if self.peers[name].may_fetch()]
            if not able or (claimed and claimed + self._limits.file_bytes_max > most):
                return
            peer = min(able, key=lambda peer: len(peer.fetches))
            peer.fetches[job.key] = job
            self.jobs.probe(job, peer.name, now)
            yield Send(peer.name, msg.Probe(*job.key, job.url, *job.within))

    def _hand_out(self, takers: Sequence[str], now: float) -> Iterator[Effect]:
        """Suspects first, since each wants a worker to itself; then sizes, which cost nothing; then jobs."""
        open_to = list(takers)
        unknown = self.jobs.unknown()
        suspects = [*takewhile(_is_suspect, unknown), *takewhile(_is_suspect, self.jobs.queued())]
        for job, name in place(suspects, open_to, self._may_take, self._held_at):
            yield self._give(job, self.peers[name], now)
        for job, name in place(dropwhile(_is_suspect, unknown), list(open_to), self._may_take, self._probes_at):
            yield self._give(job, self.peers[name], now)
        for job, name in place(dropwhile(_is_suspect, self.jobs.queued()), open_to, self._may_take, self._work_at):
            yield self._give(job, self.peers[name], now)

    def _may_take(self, name: str, job: PixelJob) -> bool:
        peer = self.peers[name]
        return peer.may_take(job) if job.shape is not None else peer.may_probe(job)

    def _held_at(self, name: str) -> tuple[float, ...]:
        """How much a worker has to do before it is free."""
        return (self.peers[name].num_busy + len(self.peers[name].probes),)

    def _probes_at(self, name: str) -> tuple[float, ...]:
        return (len(self.peers[name].probes),)

    def _work_at(self, name: str) -> tuple[float, ...]:
        """What makes a worker come later: pixels in its hand, cancelled jobs it may be busy with, a full arena."""
        peer = self.peers[name]
        return peer.pixels_in_hand, peer.num_busy, self._cache.used_bytes(peer.segment)

    def _give(self, job: PixelJob, peer: VisionPeer, now: float) -> Send:
        """The worker is to make the picture, or first to tell its size."""
        assert job.data is not None
        if job.shape is None:
            peer.probes[job.key] = job
            self.jobs.probe(job, peer.name, now)
            return Send(peer.name, msg.Probe(*job.key, "", *job.within), (job.data,))
        self.jobs.start(job, peer.name, now)
        peer.give(job, now)
        return Send(peer.name, msg.Job(*job.key, *job.within), (job.data,))


def _is_suspect(job: PixelJob) -> bool:
    return job.is_suspect
