"""All jobs that are not over, by where they are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from airside.controller.vision.job_queue import JobQueue
from airside.controller.vision.pixel_jobs import Image, ImageKey, JobState, KnownShape, PixelJob


class JobBook:
    """Keeps `PixelJob`s by name, by content and by state: the only place that moves one from state to state.

    What a vision worker has in hand is its own list (`peers.py`).
    """

    def __init__(self) -> None:
        self._jobs: dict[ImageKey, PixelJob] = {}  # in the order they were asked for
        self._by_content: dict[bytes, PixelJob] = {}  # those that may be joined
        self._remote: dict[ImageKey, PixelJob] = {}  # those that nobody fetches yet
        self._unknown: dict[ImageKey, PixelJob] = {}  # those whose size nobody has been asked for yet
        self._queue = JobQueue()
        self._num_bytes = 0  # of the files that are kept
        self._names: Counter[int] = Counter()  # jobs by the sequence that they are named after

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[PixelJob]:
        return iter(self._jobs.values())

    def open(self, job: PixelJob) -> None:
        """A new job. Nobody else makes the same, and nobody else has its name."""
        assert job.name not in self._jobs, job.name
        self._jobs[job.name] = job
        self._names[job.name[0]] += 1
        self._num_bytes += job.num_bytes
        (self._remote if job.state is JobState.REMOTE else self._unknown)[job.name] = job
        if job.content:
            self.share(job, job.content)

    def find(self, content: bytes) -> PixelJob | None:
        """The job that makes this content."""
        return self._by_content.get(content)

    def is_named_after(self, seq_id: int) -> bool:
        """Whether any job bears the name of an image of this sequence, which may have ended."""
        return seq_id in self._names

    def share(self, job: PixelJob, content: bytes) -> None:
        """`find` finds it by this from now on: its content, or, until that is known, where it is fetched from."""
        assert content not in self._by_content, content
        if self._by_content.get(job.content) is job:
            del self._by_content[job.content]
        self._by_content[content] = job
        job.content = content

    def remote(self) -> list[PixelJob]:
        """The jobs whose files nobody fetches yet, in the order they came."""
        return list(self._remote.values())

    def unknown(self) -> list[PixelJob]:
        """The jobs of unknown size that nobody has been asked about: suspects, and then in the order they came."""
        return list(self._unknown.values())

    def queued(self) -> Iterator[PixelJob]:
        """The jobs that may be given to a worker: suspects, and then in the order of their turns."""
        return iter(self._queue)

    def probe(self, job: PixelJob, worker: str, now: float) -> None:
        """The worker is asked for its file, or for its size."""
        if job.state is JobState.REMOTE:
            del self._remote[job.name]
            job.become(JobState.FETCHING)
        else:
            del self._unknown[job.name]
            job.become(JobState.PROBING)
        job.worker, job.probed_at = worker, now

    def receive(self, job: PixelJob, data: memoryview, fetch_s: float) -> None:
        """Its file was fetched."""
        job.become(JobState.UNKNOWN)
        job.worker, job.data, job.fetch_s = None, data, fetch_s
        self._num_bytes += job.num_bytes
        self._unknown[job.name] = job

    def enqueue(self, job: PixelJob, shape: KnownShape, due: float) -> None:
        """Its size is known."""
        job.become(JobState.QUEUED)
        job.worker, job.shape, job.due = None, shape, due
        self._queue.add(job)

    def start(self, job: PixelJob, worker: str, now: float) -> None:
        """The worker makes it."""
        job.become(JobState.PROCESSING)
        self._queue.remove(job)
        job.worker, job.given_at = worker, now

    def put_back(self, job: PixelJob) -> None:
        """It is taken from a worker, whose late word on it counts no more."""
        job.worker = None
        job.epoch += 1
        if job.state is JobState.FETCHING:
            job.become(JobState.REMOTE)
            self._remote[job.name] = job
        elif job.state is JobState.PROBING:
            job.become(JobState.UNKNOWN)
            self._unknown = {job.name: job, **self._unknown}
        else:
            job.become(JobState.QUEUED)
            job.due = 0.0 if job.is_suspect else job.due
            self._queue.add(job)

    def close(self, job: PixelJob) -> list[Image]:
        """It is over. Returns the images that waited for it, which now wait for nothing."""
        if job in self._queue:
            self._queue.remove(job)
        self._remote.pop(job.name, None)
        self._unknown.pop(job.name, None)
        del self._jobs[job.name]
        self._names -= Counter({job.name[0]: 1})
        self._num_bytes -= job.num_bytes
        if job.content:
            del self._by_content[job.content]
        job.become(JobState.OVER)
        images, job.images, job.data, job.worker = job.images, [], None, None
        for image in images:
            image.job = None
        return images

    @property
    def num_bytes(self) -> int:
        """Of the files that are kept."""
        return self._num_bytes

    def check(self) -> None:
        """Asserts every invariant."""
        for job in self:
            assert (job.state is JobState.REMOTE) == (job.name in self._remote), job.name
            assert (job.state is JobState.UNKNOWN) == (job.name in self._unknown), job.name
            assert (job.state is JobState.QUEUED) == (job in self._queue), job.name
            assert (job.state in (JobState.QUEUED, JobState.PROCESSING)) == (job.shape is not None), job.name
            assert (job.state in (JobState.REMOTE, JobState.FETCHING)) == (job.data is None), job.name
            assert job.images, job.name
            assert all(image.job is job for image in job.images), job.name
        assert self._num_bytes == sum(job.num_bytes for job in self)
        assert self._names == Counter(seq_id for seq_id, _ in self._jobs)
        assert {job.content for job in self if job.content} == set(self._by_content)
        assert len(self._remote) + len(self._unknown) + len(self._queue) == sum(job.worker is None for job in self)
