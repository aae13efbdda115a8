"""Pictures on their way from their URLs, in threads, so that the loop can go on talking meanwhile."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.fetch.download import Download, FetchRules, timed_out
from airside.vision_workers.fetch.guard import AllowList, parse_url
from airside.vision_workers.image_error import Cause, ImageError

log = logging.getLogger(__name__)

THREADS_MAX = 128
THREADS_PER_ENTRY_MAX = 64
"""Of one entry of the allow-list: as many as the controller asks for at a time. Others are in use only while threads
hang in the resolver. What the files take together is for the controller to bound."""

Key = tuple[int, int, int]
"""(seq_id, image_index, epoch)"""

_GRACE_S = 0.25  # how long a thread that should end by itself may take to do so


class Fetched(NamedTuple):
    """What became of one URL, and how long that took in seconds."""

    key: Key
    outcome: bytes | ImageError
    fetch_s: float


@dataclass(slots=True, eq=False)
class _Errand:
    """One URL from `start` to its outcome."""

    key: Key
    entry: str  # of the allow-list
    download: Download
    started: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Ended:
    errand: _Errand
    outcome: bytes | ImageError
    at: float = field(default_factory=time.monotonic)


class Fetcher:
    """Fetches many at once, and none for longer than its time. All methods return at once; one thread calls them.

    Each picture has a thread. When its time is over its outcome is there, even if the thread hangs in the resolver,
    which nothing can interrupt. Such a thread counts until it comes back, so that they do not become ever more; each
    entry of the allow-list has its share. Pictures for which no thread is left wait, and that is of their time.

    Args:
        rules: what may be fetched; None: nothing.
    """

    def __init__(
        self,
        rules: FetchRules | None,
        threads_max: int = THREADS_MAX,
        threads_per_entry_max: int = THREADS_PER_ENTRY_MAX,
    ) -> None:
        self._rules = rules
        self._threads_max = threads_max
        self._threads_per_entry_max = threads_per_entry_max
        self._errands: dict[Key, _Errand] = {}  # without an outcome yet
        self._waiting: list[_Errand] = []  # those without a thread
        self._threads: Counter[str] = Counter()  # by entry; those of abandoned errands count too
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._refused: list[Fetched] = []

    @classmethod
    def of(cls, settings: VisionWorkerSettings) -> Fetcher:
        """As the settings say. Raises ValueError when the allow-list has an entry that can match nothing."""
        if not settings.allow_urls:
            return cls(None)
        return cls(
            FetchRules(
                AllowList(settings.allowed_domains),
                settings.max_redirects,
                settings.fetch_timeout_s,
                settings.max_bytes,
            )
        )

    @property
    def num_open(self) -> int:
        """Pictures whose outcome is still to be taken."""
        return len(self._errands) + len(self._refused)

    def start(self, key: Key, url: str) -> None:
        """Begins to fetch; `take` gives the outcome under this key. Harmless for a key that is open."""
        if key in self._errands:
            return
        try:
            if self._rules is None:
                raise ImageError(Cause.NOT_ALLOWED, "this server fetches no pictures (vision.media.allow_urls)")
            target = parse_url(url)
            entry = self._rules.allow_list.entry_for(target.host)
        except ImageError as error:
            self._refused.append(Fetched(key, error, 0.0))
            return
        errand = _Errand(key, entry, Download(target, self._rules))
        self._errands[key] = errand
        self._waiting.append(errand)
        self._start_threads()

    def cancel(self, key: Key) -> None:
        """Nobody wants it any more: there will be no outcome. Harmless for a key that is not open."""
        self._refused = [refused for refused in self._refused if refused.key != key]
        errand = self._errands.get(key)
        if errand is not None:
            self._abandon(errand)

    def take(self) -> list[Fetched]:
        """Outcomes that have not been taken, each once."""
        outcomes, self._refused = self._refused, []
        while not self._ended.empty():
            ended = self._ended.get()
            errand = ended.errand
            self._threads[errand.entry] -= 1
            if self._errands.get(errand.key) is errand:
                del self._errands[errand.key]
                outcomes.append(Fetched(errand.key, ended.outcome, ended.at - errand.started))
        outcomes += self._take_overdue(time.monotonic())
        self._start_threads()
        return outcomes

    def close(self) -> None:
        """Wakes all threads and waits for none of them."""
        for errand in list(self._errands.values()):
            self._abandon(errand)

    def _take_overdue(self, now: float) -> list[Fetched]:
        if self._rules is None:
            return []
        timeout_s = self._rules.timeout_s
        overdue = [errand for errand in self._errands.values() if now >= errand.started + timeout_s + _GRACE_S]
        for errand in overdue:
            self._abandon(errand)
        return [Fetched(errand.key, timed_out(timeout_s), now - errand.started) for errand in overdue]

    def _abandon(self, errand: _Errand) -> None:
        del self._errands[errand.key]
        errand.download.abort()
        if errand in self._waiting:
            self._waiting.remove(errand)

    def _start_threads(self) -> None:
        for errand in list(self._waiting):
            if self._threads.total() < self._threads_max and self._threads[errand.entry] < self._threads_per_entry_max:
                self._waiting.remove(errand)
                self._start_thread(errand)

    def _start_thread(self, errand: _Errand) -> None:
        self._threads[errand.entry] += 1
        # A daemon: a resolver that hangs must not keep the process from exiting.
        thread = threading.Thread(target=self._work, args=(errand,), name="fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no more
            log.error("no thread to fetch a picture in: threads=%d", self._threads.total())
            error = ImageError(Cause.INTERNAL, "the vision worker has no thread left to fetch it in")
            self._ended.put(_Ended(errand, error))

    def _work(self, errand: _Errand) -> None:
        outcome: bytes | ImageError
        try:
            outcome = errand.download.run()
        except ImageError as error:
            outcome = error
        except Exception as error:
            # Not its message: it may hold the URL.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("fetching a picture failed unexpectedly: %s\n%s", type(error).__name__, where)
            outcome = ImageError(Cause.INTERNAL, f"the vision worker failed to fetch it ({type(error).__name__})")
        self._ended.put(_Ended(errand, outcome))
