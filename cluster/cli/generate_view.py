"""How `airside generate` shows a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from airside.cluster.client import Client
from airside.cluster.image_source import ImageSource
from airside.proto import airside_pb2 as pb

_REASONS_GOOD = {"stop", "length"}


def with_marks(prompt: str, images: Sequence[ImageSource], client: Client) -> str:
    """The prompt with one image mark per image; those it lacks are put in front."""
    if not images:
        return prompt
    mark = client.info().image_mark
    lacking = len(images) - prompt.count(mark) if mark else 0
    return mark * max(0, lacking) + prompt


def show_events(events: Iterable[pb.GenerateEvent], text: TextIO, notes: TextIO) -> bool:
    """Writes the text as it comes, and the end as one line of notes; whether it was a good end.

    Of several continuations each is written when it has ended. Log-probabilities are notes after the text.
    """
    num_continuations = 1
    held: dict[int, str] = {}  # texts of several continuations, until they end
    logprobs: dict[int, list[pb.TokenLogprob]] = {}
    ended_well = []
    for event in events:
        match event.WhichOneof("event"):
            case "accepted":
                num_continuations = max(1, len(event.accepted.seeds))
            case "delta" if num_continuations == 1:
                logprobs.setdefault(0, []).extend(event.delta.logprobs)
                text.write(event.delta.text)
                text.flush()
            case "delta":
                index = event.delta.index
                held[index] = held.get(index, "") + event.delta.text
                logprobs.setdefault(index, []).extend(event.delta.logprobs)
            case "finished":
                finished = event.finished
                ended_well.append(finished.reason in _REASONS_GOOD)
                text.write(held.pop(finished.index, "") + "\n")
                text.flush()
                notes.writelines(_logprob_line(row) + "\n" for row in logprobs.pop(finished.index, ()))
                which = f"{finished.index + 1} of {num_continuations}: " if num_continuations > 1 else ""
                notes.write(f"[{which}{_usage(finished)}]\n")
            case _:
                continue
    return len(ended_well) == num_continuations and all(ended_well)


def _logprob_line(row: pb.TokenLogprob) -> str:
    alternatives = ", ".join(f"{_spelled(top.text)} {top.logprob:.3f}" for top in row.top)
    return f"{row.logprob:9.3f} {_spelled(row.text)}" + (f"   of {alternatives}" if alternatives else "")


def _spelled(text: bytes) -> str:
    try:
        return repr(text.decode())
    except UnicodeDecodeError:  # part of a character
        return repr(text)[1:]


def _usage(finished: pb.Finished) -> str:
    usage, timings = finished.usage, finished.timings
    rate = f", {(usage.completion_tokens - 1) / timings.decode_s:.1f} tokens/s" if timings.decode_s > 0 else ""
    images = f", {usage.image_tokens} of them images" if usage.image_tokens else ""
    cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
    drafts = f", {usage.accepted_tokens} of {usage.draft_tokens} drafts accepted" if usage.draft_tokens else ""
    detail = f" ({finished.detail})" if finished.detail else ""
    return (
        f"{finished.reason}{detail}: {usage.prompt_tokens} prompt tokens{images}{cached}, "
        f"{usage.completion_tokens} new{drafts}, first after {timings.time_to_first_token_s:.2f} s{rate}"
    )
