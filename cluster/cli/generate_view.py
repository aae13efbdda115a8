"""How `airside generate` shows a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from airside.cluster.client import Client
from airside.proto import airside_pb2 as pb

_REASONS_GOOD = {"stop", "length"}


def with_marks(prompt: str, images: Sequence[bytes], client: Client) -> str:
    """The prompt with one image mark per image; those it lacks are put in front."""
    if not images:
        return prompt
    mark = client.info().image_mark
    lacking = len(images) - prompt.count(mark) if mark else 0
    return mark * max(0, lacking) + prompt


def show_events(events: Iterable[pb.GenerateEvent], text: TextIO, notes: TextIO) -> bool:
    """Writes the text as it comes, and the end as one line of notes; whether it was a good end."""
    reason = ""
    for event in events:
        match event.WhichOneof("event"):
            case "delta":
                text.write(event.delta.text)
                text.flush()
            case "finished":
                reason = event.finished.reason
                text.write("\n")
                text.flush()
                notes.write(_usage_line(event.finished) + "\n")
            case _:
                continue
    return reason in _REASONS_GOOD


def _usage_line(finished: pb.Finished) -> str:
    usage, timings = finished.usage, finished.timings
    rate = f", {(usage.completion_tokens - 1) / timings.decode_s:.1f} tokens/s" if timings.decode_s > 0 else ""
    images = f", {usage.image_tokens} of them images" if usage.image_tokens else ""
    detail = f" ({finished.detail})" if finished.detail else ""
    return (
        f"[{finished.reason}{detail}: {usage.prompt_tokens} prompt tokens{images}, {usage.completion_tokens} new, "
        f"first after {timings.time_to_first_token_s:.2f} s{rate}]"
    )
