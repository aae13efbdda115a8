"""What the offline `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from airside.proto import airside_pb2 as pb


@dataclass(slots=True)
class Completion:
    """One continuation of a prompt."""

    index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    """One per token, if they were asked for."""
    finish_reason: str = ""
    """As in `airside.v1.Finished`, or "rejected" when it was never begun."""
    detail: str = ""
    stop_match: str = ""
    """The stop string that ended the text; empty when none did."""
    usage: pb.Usage = field(default_factory=pb.Usage)
    timings: pb.Timings = field(default_factory=pb.Timings)
    """Seconds; `time_to_first_token_s` counts from the call of `generate`."""

    def add(self, event: pb.GenerateEvent) -> None:
        """Takes a delta's tokens, or the end."""
        match event.WhichOneof("event"):
            case "delta":
                self.token_ids += event.delta.token_ids
                self.text += event.delta.text
                self.logprobs += event.delta.logprobs
            case "finished":
                finished = event.finished
                self.finish_reason, self.detail, self.stop_match = finished.reason, finished.detail, finished.stop_match
                self.usage, self.timings = finished.usage, finished.timings


@dataclass(slots=True)
class RequestOutput:
    """What one prompt led to: `outputs` has all its continuations, and what is told here of one is of the first."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    """If they were asked for: of the prompt's tokens from the second on, each picture with all it takes."""

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """Its text."""
        return self.outputs[0].text

    @property
    def logprobs(self) -> list[pb.TokenLogprob]:
        """One per token, if they were asked for."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        return self.outputs[0].finish_reason

    @property
    def detail(self) -> str:
        """The same in words."""
        return self.outputs[0].detail

    @property
    def seed(self) -> int:
        """Which seed it had."""
        return self.outputs[0].seed

    @property
    def usage(self) -> pb.Usage:
        """Numbers of tokens."""
        return self.outputs[0].usage

    @property
    def timings(self) -> pb.Timings:
        """What took how long."""
        return self.outputs[0].timings


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a continuation of a prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token, given the prompt and the tokens before it; natural logarithms."""

    @property
    def total(self) -> float:
        """Of the whole continuation."""
        return sum(self.logprobs)
