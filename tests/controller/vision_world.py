"""The vision ledger amid workers, an engine and requests that are simulated: seeded, in virtual time, without sockets.

Workers die, stop, hang on a picture, are drained and replaced; messages come late, twice, or from somebody else. Some
share their memory with the ranks, the others send pixels. Launches of ranks are lost. The world checks at every event
what must always hold, and at its end that nothing is left over.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

from airside.controller.vision.dispatch import VisionLimits
from airside.controller.vision.effects import (
    Effect,
    ParcelUnused,
    PixelsReady,
    SegmentUnused,
    Send,
    ShapeKnown,
    VisionFailed,
)
from airside.controller.vision.ledger import ImageFile, VisionLedger
from airside.controller.vision.parcels import Parcels
from airside.proto import messages as msg
from tests.controller.vision_fakes import ARENA_BYTES, FakeJob, FakeSequence, FakeWorker, Picture

JOB_S, FETCH_S, SILENCE_S = 2.0, 1.0, 1.5
SECONDS_PER_PIXEL = 1e-7
LONGEST_S = 60.0
"""An image that has waited for longer, in a world that is calm again, has been forgotten."""


class World:
    """One run. `run` raises AssertionError with whatever does not hold."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.limits = VisionLimits(
            attempts_max=3,
            job_s=JOB_S,
            fetch_s=FETCH_S + JOB_S,
            bytes_max=self.rng.choice([60, 400]),
            file_bytes_max=15,
            cache_bytes=self.rng.choice([0, 512, 4096]),
        )
        self.ledger = VisionLedger(self.limits)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count(1)
        self.workers: dict[str, FakeWorker] = {}
        self.sequences: dict[int, FakeSequence] = {}
        self.steps: deque[set[tuple[str, int]]] = deque()  # in flight, and which slabs each reads
        self.parcels = Parcels()
        self.rank_memory: dict[tuple[str, int], bytes] = {}  # what the ranks of this launch were sent and keep
        self.ends: Counter[tuple[int, int]] = Counter()  # ready or failed, by image
        self.unlinked: set[str] = set()
        self.tally: Counter[str] = Counter()
        self.unlucky: Counter[int] = Counter()  # how often a picture was in the hands of a worker that trouble hit
        self.pictures = [self._picture(number) for number in range(12)]
        self.is_calm = False  # no more trouble, no more arrivals

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, seconds: float = 10.0) -> None:
        for at in range(self.rng.randrange(3)):
            self.after(at * 0.1, self.start_worker)
        for what, every in ((self.request, 0.08), (self.step, 0.1), (self.trouble, 0.5), (self.watch, 0.1)):
            self.repeat(what, every)
        self.repeat(self.lose_launch, 1.5)
        self.go(seconds)
        self.is_calm = True
        calm_at = self.now
        while self.sequences and self.now < calm_at + LONGEST_S:
            self.go(1.0)
        left = {seq_id: seq for seq_id, seq in self.sequences.items() if len(seq.ready) < len(seq.pictures)}
        assert not left, f"forgotten: {left}, {self.describe()}"
        self._all_go_home()

    def go(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.now + seconds
        while self.events and self.events[0][0] <= end:
            self.now, _, act = heapq.heappop(self.events)
            act()
            self.ledger.check()
            assert self.ledger.bytes_waiting <= self.limits.bytes_max
        self.now = end

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), act))

    def repeat(self, act: Callable[[], None], every: float) -> None:
        def again() -> None:
            act()
            self.after(self.rng.uniform(0.2, 1.8) * every, again)

        self.after(every, again)

    def describe(self) -> str:
        states = {name: (w.is_dead, w.is_stopped, len(w.jobs), w.slabs.num_taken) for name, w in self.workers.items()}
        return f"workers {states}, load {self.ledger.load(self.now)}, tally {self.tally}"

    def _all_go_home(self) -> None:
        for seq_id in list(self.sequences):
            self.end(seq_id)
        self.steps.clear()
        self.perform(self.ledger.drop_steps())
        for worker in [worker for worker in self.workers.values() if not worker.is_lost]:
            self.perform(self.ledger.drain(worker.name))
        self.go(3 * JOB_S)
        assert self.ledger.bytes_waiting == self.ledger.num_queued == self.ledger.cache_bytes == 0
        left = {worker.name: worker.slabs.num_taken for worker in self.workers.values() if not worker.is_lost}
        assert not any(left.values()), f"slabs that never came back: {left}"
        for worker in [worker for worker in self.workers.values() if not worker.is_lost]:
            self.lose(worker)
        assert self.unlinked == {worker.segment for worker in self.workers.values() if worker.shares_memory}
        assert not self.rank_memory, "the ranks keep what nobody needs"

    # --- requests and the engine ----------------------------------------------------------------------------------

    def _picture(self, number: int) -> Picture:
        fates = ["fine"] * 25 + ["damaged", "no_header", "kills", "kills_prober", "hangs"]
        pixels = self.rng.choice([10_000, 100_000, 400_000, 2_000_000, 8_000_000])
        return Picture(number, pixels, 64 * self.rng.choice([1, 2, 8, 20, 40]), self.rng.choice(fates))

    def request(self) -> None:
        if self.is_calm:
            return
        pictures = self.rng.choices(self.pictures, k=self.rng.choice([1, 1, 1, 2, 3]))
        salt, copies = self.rng.choice(["", "", "salt"]), self.rng.choice([1, 1, 1, 3])
        files = [self._file(picture) for picture in pictures]
        for _ in range(copies):
            if self.ledger.refusal(files, salt) is not None:
                self.tally["refused"] += 1
                continue
            seq_id = next(self.numbers)
            self.sequences[seq_id] = FakeSequence(pictures, self.now)
            self.perform(self.ledger.add(seq_id, files, self.now, salt))
            if self.rng.random() < 0.2:
                self.after(self.rng.expovariate(2), lambda seq_id=seq_id: self.end(seq_id))  # type: ignore[misc]

    def _file(self, picture: Picture) -> ImageFile:
        match self.rng.choice(["file", "file", "file", "file without a hash", "url"]):
            case "url":
                return ImageFile(memoryview(b""), f"http://t/{picture.number}")
            case "file":
                return ImageFile(memoryview(picture.data), "", picture.hash)
        return ImageFile(memoryview(picture.data))

    def end(self, seq_id: int) -> None:
        if self.sequences.pop(seq_id, None) is not None:
            self.perform(self.ledger.end(seq_id, self.now))

    def step(self) -> None:
        """A step ends, or another one begins that reads the pixels of some sequences."""
        if self.steps and (len(self.steps) == 2 or self.rng.random() < 0.5):
            self.steps.popleft()
            self.perform(self.ledger.close_step())
            return
        whole = [seq_id for seq_id, seq in self.sequences.items() if len(seq.ready) == len(seq.pictures)]
        chosen = self.rng.sample(whole, min(len(whole), 3))
        for seq_id in chosen:
            for index, picture in enumerate(self.sequences[seq_id].pictures):
                ref, _ = self.ledger.pixels(seq_id, index)
                owner = next(worker for worker in self.workers.values() if worker.segment == ref.segment)
                assert owner.contents[ref.slab] == picture.number, "the pixels of another picture"
                assert ref.segment not in self.unlinked
        self.ledger.begin_step(chosen)
        self._send_pixels(chosen)
        self.steps.append({place for seq_id in chosen for place in self.sequences[seq_id].ready.values()})
        for seq_id in chosen:
            if self.rng.random() < 0.4:
                self.after(self.rng.uniform(0, 0.3), lambda seq_id=seq_id: self.end(seq_id))  # type: ignore[misc]

    def _send_pixels(self, seq_ids: Sequence[int]) -> None:
        """Before a plan; what it reads is then to be found in shared memory, or with the ranks."""
        images = [(seq_id, index) for seq_id in seq_ids for index in range(len(self.sequences[seq_id].pictures))]
        for slab in self.parcels.take_missing(self.ledger.slab_of(*image) for image in images):
            assert slab.data is not None
            assert (slab.ref.segment, slab.ref.slab) not in self.rank_memory, "sent twice"
            self.rank_memory[slab.ref.segment, slab.ref.slab] = bytes(slab.data)
            self.tally["sent"] += 1
        for seq_id, index in images:
            picture, place = self.sequences[seq_id].pictures[index], self.sequences[seq_id].ready[index]
            owner = next(worker for worker in self.workers.values() if worker.segment == place[0])
            expected = None if owner.shares_memory else picture.tensors
            assert self.rank_memory.get(place) == expected, "the ranks have other pixels"

    def lose_launch(self) -> None:
        """The ranks are gone, with all that they had; others take their place."""
        if self.is_calm:
            return
        self.tally["launches lost"] += 1
        self.steps.clear()
        self.parcels.clear()
        self.rank_memory.clear()
        self.perform(self.ledger.drop_steps())

    # --- what the ledger asks for ---------------------------------------------------------------------------------

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case ShapeKnown():
                    seq = self.sequences[effect.seq_id]
                    assert effect.image_index not in seq.shaped, "a shape told twice"
                    seq.shaped.add(effect.image_index)
                case PixelsReady():
                    self._ready(effect)
                case VisionFailed():
                    self._failed(effect)
                case SegmentUnused():
                    assert effect.segment not in self.unlinked
                    self.unlinked.add(effect.segment)
                case ParcelUnused():
                    place = (effect.segment, effect.slab)
                    assert not any(place in step for step in self.steps), f"{place} is dropped, and a step reads it"
                    if self.parcels.forget(*place):
                        del self.rank_memory[place]

    def _ready(self, ready: PixelsReady) -> None:
        seq = self.sequences[ready.seq_id]
        assert ready.image_index in seq.shaped
        self.ends[ready.seq_id, ready.image_index] += 1
        assert self.ends[ready.seq_id, ready.image_index] == 1
        ref, _ = self.ledger.pixels(ready.seq_id, ready.image_index)
        seq.ready[ready.image_index] = (ref.segment, ref.slab)
        picture = seq.pictures[ready.image_index]
        assert picture.fate == "fine", picture
        self.tally["cached" if ready.is_cached else "made"] += 1
        stages = ready.stages
        parts = (stages.fetch_s, stages.queue_s, stages.decode_s, stages.process_s, stages.transport_s)
        assert min(parts) >= 0
        assert sum(parts) <= self.now - seq.arrived + FETCH_S + 1e-6

    def _failed(self, failed: VisionFailed) -> None:
        seq, index = self.sequences[failed.seq_id], int(failed.detail.split()[1].rstrip(":"))
        self.ends[failed.seq_id, index] += 1
        assert self.ends[failed.seq_id, index] == 1
        picture, why = seq.pictures[index], failed.detail.partition(": ")[2]
        self.tally[why.partition(":")[0]] += 1
        if not seq.failed:
            seq.failed = why
            self.after(0.001, lambda: self.end(failed.seq_id))
        if "room" in why or "arena" in why:
            return
        assert picture.fate != "fine" or self.unlucky[picture.number] > 1, failed

    def _send(self, send: Send) -> None:
        worker = self.workers[send.peer]
        assert not worker.is_lost, f"{send.message} to a lost worker"
        match send.message:
            case msg.Job() | msg.Probe():
                assert not worker.is_draining, f"{send.message} to a draining worker"
            case msg.Release(slab=slab):
                place = (worker.segment, slab)
                users = [seq_id for seq_id, seq in self.sequences.items() if place in seq.ready.values()]
                assert not users, f"{place} is released, and {users} are ready by it"
                assert not any(place in step for step in self.steps), f"{place} is released, and a step reads it"
            case msg.Drain():
                worker.is_draining = True
        self._later(worker, lambda: self._receive(worker, send))

    def _later(self, worker: FakeWorker, act: Callable[[], None]) -> None:
        worker.next_arrival = max(worker.next_arrival, self.now + self.rng.choice([0.0, 0.001, 0.05])) + 1e-9
        self.after(worker.next_arrival - self.now, act)

    # --- workers --------------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        number = next(self.numbers)
        worker = FakeWorker(f"v{number}", shares_memory=number % 2 == 0)
        self.workers[worker.name] = worker
        self.perform(self.ledger.join(worker.name, worker.segment, ARENA_BYTES, self.now, worker.shares_memory))
        self._say(worker, msg.Credit(4))

    def _say(self, worker: FakeWorker, message: msg.Message, *files: bytes) -> None:
        """The message travels for a while. In troubled times it comes twice, or an old one comes again."""
        worker.said.append(message)
        self._arrive_later(worker, message, files)
        if self.is_calm or isinstance(message, msg.Credit | msg.ArenaFull):
            return
        if self.rng.random() < 0.05:
            self.after(self.rng.uniform(0, 1), lambda: self._hear(worker, message, files))
        if self.rng.random() < 0.05:
            stale = self.rng.choice(worker.said)
            if isinstance(stale, msg.Shape | msg.Fetched | msg.ImageFailed):
                self._arrive_later(self.rng.choice(list(self.workers.values())), stale, files)

    def _arrive_later(self, worker: FakeWorker, message: msg.Message, files: Sequence[bytes]) -> None:
        worker.next_word = max(worker.next_word, self.now + self.rng.choice([0.0, 0.002, 0.03])) + 1e-9
        self.after(worker.next_word - self.now, lambda: self._hear(worker, message, files))

    def _hear(self, worker: FakeWorker, message: msg.Message, files: Sequence[bytes]) -> None:
        if worker.is_lost:
            return
        ledger, name, frames = self.ledger, worker.name, [memoryview(file) for file in files]
        match message:
            case msg.Credit():
                self.perform(ledger.credit(name, message.jobs, self.now))
            case msg.Fetched():
                self.perform(ledger.fetched(name, message, frames, self.now))
            case msg.Shape():
                self.perform(ledger.shape(name, message, self.now))
            case msg.Pixels():
                self.perform(ledger.pixels_in(name, message, frames, self.now))
            case msg.ImageFailed():
                self.perform(ledger.image_failed(name, message, self.now))
            case msg.ArenaFull():
                self.perform(ledger.arena_full(name, message.num_bytes, self.now))

    def _receive(self, worker: FakeWorker, send: Send) -> None:
        if worker.is_dead or worker.is_stopped:
            if worker.is_troubled and send.attachments:
                self.unlucky[self._picture_of(bytes(send.attachments[0])).number] += 1
            return
        match send.message:
            case msg.Probe(url="") as probe:
                self._answer(worker, (probe.seq_id, probe.image_index, probe.epoch), bytes(send.attachments[0]))
            case msg.Probe() as probe:
                key = (probe.seq_id, probe.image_index, probe.epoch)
                picture, seconds = self.pictures[int(probe.url.rpartition("/")[2])], self.rng.uniform(0, FETCH_S)
                self.after(seconds, lambda: self._fetched(worker, key, picture, seconds))
            case msg.Job() as job:
                picture = self._picture_of(bytes(send.attachments[0]))
                worker.jobs.append(FakeJob((job.seq_id, job.image_index, job.epoch), picture))
                self._work(worker)
            case msg.Cancel() as cancel:
                self._cancel(worker, (cancel.seq_id, cancel.image_index, cancel.epoch))
            case msg.Release(slab=slab):
                assert worker.slabs.holds(slab), "a slab is released that is not out"
                worker.slabs.release(slab)
                del worker.contents[slab]
                self._work(worker)

    def _picture_of(self, data: bytes) -> Picture:
        return self.pictures[int(data.split()[1])]

    def _fetched(self, worker: FakeWorker, key: tuple[int, int, int], picture: Picture, seconds: float) -> None:
        if not worker.is_dead and not worker.is_stopped:
            self._say(worker, msg.Fetched(*key, picture.hash, seconds), picture.data)

    def _answer(self, worker: FakeWorker, key: tuple[int, int, int], data: bytes) -> None:
        picture = self._picture_of(data)
        worker.probing.add(picture.number)
        if worker.is_dead or worker.is_stopped:
            return
        if picture.fate == "kills_prober":
            self.kill(worker)
        elif picture.fate == "no_header":
            self._say(worker, msg.ImageFailed(*key, "damaged", "no header"))
        else:
            self._say(worker, msg.Shape(*key, b"\7\0\0\0", picture.pixels, 1))

    def _cancel(self, worker: FakeWorker, key: tuple[int, int, int]) -> None:
        for job in [job for job in worker.jobs if job.key == key]:
            job.is_wanted = False
        self._work(worker)

    def _work(self, worker: FakeWorker) -> None:
        """Goes on with the first job, as far as that can go now."""
        if worker.is_dead or worker.is_stopped or not worker.jobs:
            return
        job = worker.jobs[0]
        if job.done_at is None:
            seconds = 0.002 + job.picture.pixels * SECONDS_PER_PIXEL
            job.done_at = self.now + (seconds if job.is_wanted else 0.0)
            self.after(job.done_at - self.now, lambda: self._work(worker))
        elif self.now >= job.done_at:
            self._done(worker, job)

    def _done(self, worker: FakeWorker, job: FakeJob) -> None:
        picture = job.picture
        if job.is_wanted and picture.fate in ("kills", "hangs"):
            worker.is_stopped = picture.fate == "hangs"
            if picture.fate == "kills":
                self.kill(worker)
            return
        if job.is_wanted and picture.fate == "damaged":
            self._say(worker, msg.ImageFailed(*job.key, "damaged", "its end is missing"))
        elif job.is_wanted and not worker.slabs.can_allocate(picture.slab_bytes):
            self._say(worker, msg.ArenaFull(picture.slab_bytes))
            self.tally["full"] += 1
            self.after(0.1, lambda: self._work(worker))
            return
        elif job.is_wanted:
            slab = worker.slabs.allocate(picture.slab_bytes)
            worker.contents[slab] = picture.number
            ref = msg.PixelsRef(worker.segment, slab, picture.slab_bytes, [])
            pixels = msg.Pixels(*job.key, ref, 0.001, picture.pixels * SECONDS_PER_PIXEL)
            self._say(worker, pixels, *([] if worker.shares_memory else [picture.tensors]))
        worker.jobs.popleft()
        self._say(worker, msg.Credit(1))
        self._work(worker)

    # --- trouble --------------------------------------------------------------------------------------------------

    def kill(self, worker: FakeWorker) -> None:
        worker.is_dead = True
        self.tally["kills"] += 1
        self.after(self.rng.uniform(0, 0.2), lambda: self.lose(worker))

    def lose(self, worker: FakeWorker) -> None:
        if not worker.is_lost:
            worker.is_lost = worker.is_dead = True
            self.perform(self.ledger.lose(worker.name, self.now))

    def watch(self) -> None:
        """The controller gives up who is stuck, and, after a while, who is silent; the pool is filled up."""
        for name in self.ledger.stuck(self.now):
            self.tally["stuck"] += 1
            self.lose(self.workers[name])
        alive = [worker for worker in self.workers.values() if not worker.is_lost and not worker.is_draining]
        if len(alive) < (2 if self.is_calm else self.rng.randrange(4)) and not self._is_over():
            self.start_worker()
        for worker in [worker for worker in self.workers.values() if worker.is_draining and not worker.is_lost]:
            if not worker.jobs and worker.slabs.num_taken == 0 and not self._is_over():
                self.after(0.1, lambda worker=worker: self.lose(worker))  # type: ignore[misc]

    def _is_over(self) -> bool:
        return self.is_calm and not self.sequences

    def trouble(self) -> None:
        alive = [w for w in self.workers.values() if not w.is_lost and not w.is_dead and not w.is_stopped]
        if self.is_calm or not alive:
            return
        worker = self.rng.choice(alive)
        self.unlucky.update({job.picture.number for job in worker.jobs} | worker.probing)
        match self.rng.choice(["nothing", "nothing", "kill", "stop", "drain"]):
            case "kill":
                worker.is_troubled = True
                self.kill(worker)
            case "stop":
                worker.is_stopped = worker.is_troubled = True
                self.tally["stops"] += 1
                self.after(SILENCE_S, lambda: self.lose(worker))
            case "drain":
                self.perform(self.ledger.drain(worker.name))
