"""One request of the demo and what has come back of it so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from airside.cluster.demo_model.exhibits import Exhibit
from airside.proto import airside_pb2 as pb

if TYPE_CHECKING:
    from airside.proto.airside_pb2_grpc import InferenceAsyncStub


@dataclass(slots=True)
class Exchange:
    """A chat of one question, with or without pictures, and its streamed reply. Times are of this client's clock."""

    name: str
    question: str
    exhibit: Exhibit | None = None
    max_tokens: int | None = 48  # None: as many as the context has room for
    sampling: pb.Sampling = field(default_factory=lambda: pb.Sampling(temperature=0))
    request_id: str = ""
    text: str = ""
    num_tokens: int = 0
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)  # when each delta came
    finished: pb.Finished | None = None
    error: str = ""

    @classmethod
    def about(cls, exhibit: Exhibit) -> Exchange:
        """A question about pictures that come with the demo model."""
        return cls(name=exhibit.title, question=exhibit.question, exhibit=exhibit)

    @property
    def ok(self) -> bool:
        """It ended by itself: an end token or its token limit."""
        return self.finished is not None and self.finished.reason in {"stop", "length"}

    @property
    def is_right(self) -> bool:
        """The whole answer about the pictures is the expected one."""
        return self.exhibit is not None and self.text.strip() == self.exhibit.answer

    @property
    def time_to_first_token_s(self) -> float | None:
        """From sending the request to its first token; None before that."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None while there is only one."""
        if self.num_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.num_tokens - 1) / (self.token_times[-1] - self.token_times[0])

    @property
    def longest_pause_s(self) -> float:
        """The longest wait between two deltas."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    async def run(self, inference: InferenceAsyncStub) -> None:
        """Sends the request and takes in events until it ends. A failure becomes `error`, nothing is raised."""
        self.sent_at = time.monotonic()
        try:
            async for event in inference.Chat(self._message()):
                self._take(event)
        except grpc.aio.AioRpcError as error:
            if self.finished is None:  # after `finished` the status only repeats it
                self.error = f"{error.code().name}: {error.details()}"
        if self.finished is None and not self.error:
            self.error = "the stream ended without a finish"

    def _take(self, event: pb.GenerateEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                self.request_id = event.accepted.request_id
            case "delta":
                self.token_times.append(time.monotonic())
                self.num_tokens += len(event.delta.token_ids)
                self.text += event.delta.text
            case "finished":
                self.finished = event.finished

    def _message(self) -> pb.ChatRequest:
        pictures = self.exhibit.pictures if self.exhibit is not None else ()
        parts = [pb.Part(image=pb.Image(data=picture)) for picture in pictures]
        parts.append(pb.Part(text=self.question))
        return pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", parts=parts)],
            sampling=self.sampling,
            stop=pb.Stop(max_tokens=self.max_tokens),
        )
