"""What this gateway measures of its own requests, for Prometheus. Times are unix time, durations seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from airside.proto.messages import FinishedRow, ImageEncoded, ImageReady

# Each bound is about twice the one before, so that a quantile read from the buckets is right within a factor of two.
_GAP_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
_WAIT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
_STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4, 8, 16)
_BYTES_BUCKETS = tuple(2.0**power for power in range(10, 27))  # 1 KiB to 64 MiB

_PIXELS_BUCKETS = tuple(4.0**power for power in range(5, 14))  # 32 x 32 to 8192 x 8192

_REASONS = (
    "stop",
    "length",
    "abort",
    "prompt_length_exceeded",
    "insufficient_system_resource",
    "vision_failed",
    "structured_output_failed",
)
"""There from the start, so that the first end of its kind is an increase."""

_DEADLINE_STAGES = ("check", "images", "queue", "prefill", "decode")
"""Likewise. The first is the gateway's own, of a call that is no sequence yet; the others are the engine's words."""

_STAGES = {
    "fetch": "Fetching an image from a URL.",
    "queue": "How long an image of known shape waited for a vision worker.",
    "decode": "Decoding an image file to upright RGB.",
    "process": "From upright RGB to the tensors that the model takes.",
    "transport": "Of an image between processes, and waiting for room in shared memory.",
}


@dataclass(slots=True)
class TokenTimes:
    """When a sequence came, and when it last made tokens."""

    arrival: float
    last: float | None = None


class RequestMetrics:
    """Histograms and counters of one gateway. To record costs microseconds, and waits for nobody.

    A stage of an image that did not happen (nothing was fetched; an equal picture had left its pixels) is not counted.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per histogram, of no use
        self.registry = CollectorRegistry()
        """What there is to be collected; of this object's own, so that one process can have several."""
        self._first_token = self._histogram(
            "time_to_first_token", "From the arrival of the call to the first token of a sequence.", _WAIT_BUCKETS
        )
        self._gap = self._histogram(
            "inter_token_latency", "Between two tokens of a sequence; those that come at once share it.", _GAP_BUCKETS
        )
        self._whole = self._histogram(
            "e2e_request_latency", "From the arrival of the call to the end of a sequence.", _WAIT_BUCKETS
        )
        self._queued = self._histogram(
            "request_queue_time", "From the arrival of the call to the first step of a sequence.", _WAIT_BUCKETS
        )
        self._finished = Counter(
            "airside_requests_finished_total",
            "Sequences that came to an end through this gateway, by the reason that the client was told.",
            ["reason"],
            registry=self.registry,
        )
        for reason in _REASONS:
            self._finished.labels(reason)
        self._stages = {
            stage: self._histogram(f"image_{stage}", text, _STAGE_BUCKETS) for stage, text in _STAGES.items()
        }
        self._image_wait = self._histogram(
            "image_wait", "From the arrival of the call until the pixels of an image were in.", _WAIT_BUCKETS
        )
        self._image_encode = self._histogram(
            "image_encode", "Computing the embeddings of an image, on rank 0.", _STAGE_BUCKETS
        )
        self._image_bytes = Histogram(
            "airside_image_bytes",
            "Size of an image file that came with a request.",
            buckets=_BYTES_BUCKETS,
            registry=self.registry,
        )

        self._image_pixels = Histogram(
            "airside_image_pixels",
            "Width times height of an image of a request, once its pixels are in.",
            buckets=_PIXELS_BUCKETS,
            registry=self.registry,
        )
        self._expired = Counter(
            "airside_deadline_expired_total",
            "Sequences that their deadline ended, by what they were at; `check`: calls, before they were sequences.",
            ["stage"],
            registry=self.registry,
        )
        for stage in _DEADLINE_STAGES:
            self._expired.labels(stage)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"airside_{name}_seconds", text, buckets=tuple(buckets), registry=self.registry)

    def images_came(self, images: Iterable[bytes]) -> None:
        """The files of one request. Empty ones are yet to be fetched."""
        for image in images:
            if image:
                self._image_bytes.observe(len(image))

    def image_sized(self, num_pixels: int) -> None:
        """The size of an image of a request is known. Once for all of its continuations."""
        if num_pixels:
            self._image_pixels.observe(num_pixels)

    def deadline_expired(self, stage: str) -> None:
        """A deadline has ended a sequence, or a call that was not one yet."""
        self._expired.labels(stage).inc()

    def tokens_came(self, times: TokenTimes, count: int, now: float) -> None:
        """A sequence has made `count` tokens, at least one, in a step."""
        if times.last is None:
            self._first_token.observe(now - times.arrival)
        else:
            gap = (now - times.last) / count
            for _ in range(count):
                self._gap.observe(gap)
        times.last = now

    def image_ready(self, news: ImageReady, arrival: float, now: float) -> None:
        """The pixels of an image are in."""
        self._image_wait.observe(now - arrival)
        if news.stages is None:
            return
        for stage, histogram in self._stages.items():
            seconds = getattr(news.stages, f"{stage}_s")
            if seconds > 0:
                histogram.observe(seconds)

    def image_encoded(self, news: ImageEncoded) -> None:
        """The embeddings of an image are there."""
        if news.encode_s > 0:
            self._image_encode.observe(news.encode_s)

    def finished(self, reason: str, row: FinishedRow | None, arrival: float, now: float) -> None:
        """A sequence has ended for its client. `row`: what the engine says of it; None: nothing (any more)."""
        self._finished.labels(reason).inc()
        self._whole.observe(now - arrival)
        if row is not None:
            self._queued.observe(row.queued_s)
