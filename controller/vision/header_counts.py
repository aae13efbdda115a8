"""How many tokens images take, read from their headers alone: for a client that asks, and no sequence. Pure.

count:  open ──Probe per image──> a vision worker ──Shape per image──> answered
                    ^                    │
                    └──── another ───────┘ it is lost, `ATTEMPTS_MAX` times at most
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from airside.controller.vision.effects import Send
from airside.proto import messages as msg
from airside.proto.image_cause import ImageCause
from airside.proto.image_content import PixelRange, pixel_ranges

FIRST_ID = 1 << 63
"""Counts are named to vision workers by ids from here on; those of sequences are below."""

ATTEMPTS_MAX = 3
"""Vision workers that may be lost to one count."""

IMAGES_MAX = 1024
"""Of all counts that are not answered, unless one alone has more: a fourth of what one outbox has room for."""


@dataclass(slots=True, eq=False)
class _Count:
    gateway: str
    query_id: int
    files: list[memoryview]
    ranges: list[PixelRange]
    worker: str
    attempt: int = 1  # also the epoch of its messages
    tokens: dict[int, int] = field(default_factory=dict)  # by image, of those that were told


class HeaderCounts:
    """All counts that are not answered yet. Each is one vision worker's.

    Args:
        bytes_max: of the files of all of them together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._counts: dict[int, _Count] = {}
        self._ids = itertools.count(FIRST_ID)
        self._num_bytes = self._num_images = 0

    def open(
        self, gateway: str, query: msg.CountImages, files: Sequence[memoryview], takers: Sequence[str]
    ) -> list[Send]:
        """A gateway asks for these images. `takers`: vision workers that may be asked."""
        query_id = query.query_id
        try:
            ranges = pixel_ranges(query.min_pixels, query.max_pixels, len(files))
        except ValueError as error:
            return [Send(gateway, msg.ImagesCounted(query_id, [], "invalid", str(error)))]
        if refused := self._refusal(files):
            return [Send(gateway, msg.ImagesCounted(query_id, [], *refused))]
        if not files:
            return [Send(gateway, msg.ImagesCounted(query_id, []))]
        self._num_bytes += _num_bytes(files)
        self._num_images += len(files)
        count_id = next(self._ids)
        self._counts[count_id] = count = _Count(gateway, query_id, list(files), ranges, "")
        return self._ask(count_id, count, takers)

    def is_ours(self, message: msg.Shape | msg.ImageFailed) -> bool:
        """Whether a vision worker speaks of a count, answered or not, and of no sequence's image."""
        return message.seq_id >= FIRST_ID

    def hear(self, worker: str, message: msg.Shape | msg.ImageFailed) -> list[Send]:
        """What a vision worker says of an image. Stale words are fine."""
        count = self._counts.get(message.seq_id)
        if count is None or (worker, message.epoch) != (count.worker, count.attempt):
            return []
        index = message.image_index
        if not 0 <= index < len(count.files):
            return []
        if isinstance(message, msg.ImageFailed):
            return self._refuse(message.seq_id, message.cause, f"image {index}: {message.cause}: {message.detail}")
        count.tokens[index] = len(message.expansion) // 4
        if len(count.tokens) < len(count.files):
            return []
        tokens = [count.tokens[i] for i in range(len(count.files))]
        return [self._close(message.seq_id, msg.ImagesCounted(count.query_id, tokens))]

    def has_asked(self, worker: str) -> bool:
        """Whether this vision worker has headers to read."""
        return any(count.worker == worker for count in self._counts.values())

    def lose(self, worker: str, takers: Sequence[str]) -> list[Send]:
        """A vision worker is gone. Others are asked, unless it may be for one of these images that it is."""
        sends: list[Send] = []
        for count_id, count in [entry for entry in self._counts.items() if entry[1].worker == worker]:
            if count.attempt >= ATTEMPTS_MAX:
                why = f"vision workers were lost while they read the headers, {ATTEMPTS_MAX} times"
                sends += self._refuse(count_id, ImageCause.WORKER_LOST, why)
                continue
            count.attempt += 1
            count.tokens.clear()
            sends += self._ask(count_id, count, takers)
        return sends

    def forget(self, gateway: str) -> None:
        """A gateway is gone, and nobody waits for its answers."""
        for count_id in [number for number, count in self._counts.items() if count.gateway == gateway]:
            self._drop(count_id)

    def _refusal(self, files: Sequence[memoryview]) -> tuple[str, str] | None:
        """Code and detail, as in `Rejected`, of why these files cannot be counted now."""
        num_bytes, taken, most = _num_bytes(files), self._num_bytes, self._bytes_max
        if num_bytes > most:
            return "invalid", (
                f"the images have {num_bytes} bytes together, at most {most} may be counted at a time "
                "(vision.limits.max_waiting_bytes); send fewer or smaller ones"
            )
        if taken + num_bytes > most:
            return "queue_full", (
                f"images with {taken} bytes are being counted, and {num_bytes} more would be over the limit of {most} "
                "(vision.limits.max_waiting_bytes); try again later"
            )
        if self._counts and self._num_images + len(files) > IMAGES_MAX:
            return "queue_full", (
                f"{self._num_images} images are being counted, at most {IMAGES_MAX} may be; try again later"
            )
        return None

    def _ask(self, count_id: int, count: _Count, takers: Sequence[str]) -> list[Send]:
        if not takers:
            why = "no vision worker is up that could read the images' headers; try again later"
            return [self._close(count_id, msg.ImagesCounted(count.query_id, [], "unavailable", why))]
        taken = Counter(other.worker for other in self._counts.values())
        count.worker = min(takers, key=lambda name: taken[name])
        return [
            Send(count.worker, msg.Probe(count_id, index, count.attempt, "", *within), (file,))
            for index, (file, within) in enumerate(zip(count.files, count.ranges, strict=True))
        ]

    def _refuse(self, count_id: int, cause: str, detail: str) -> list[Send]:
        query_id = self._counts[count_id].query_id
        return [self._close(count_id, msg.ImagesCounted(query_id, [], "image", detail, cause))]

    def _close(self, count_id: int, answer: msg.ImagesCounted) -> Send:
        return Send(self._drop(count_id).gateway, answer)

    def _drop(self, count_id: int) -> _Count:
        count = self._counts.pop(count_id)
        self._num_bytes -= _num_bytes(count.files)
        self._num_images -= len(count.files)
        return count


def _num_bytes(files: Sequence[memoryview]) -> int:
    return sum(file.nbytes for file in files)
