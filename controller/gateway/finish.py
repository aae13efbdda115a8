"""How a sequence ended, as clients see it: the last event, and the status after it."""

from __future__ import annotations

import dataclasses

import grpc

from airside.controller.gateway.errors import RETRY_AFTER_S, RequestError, unavailable
from airside.proto import airside_pb2 as pb
from airside.proto.abort_cause import AbortCause
from airside.proto.image_cause import ImageCause
from airside.proto.messages import FinishedRow, Rejected

_Code = grpc.StatusCode

_REJECTIONS: dict[str, tuple[grpc.StatusCode, str, float | None]] = {
    # code of messages.Rejected: status, field, advice to retry
    "duplicate_id": (_Code.ALREADY_EXISTS, "request_id", None),
    "context_exceeded": (_Code.INVALID_ARGUMENT, "prompt", None),
    "pool_exceeded": (_Code.RESOURCE_EXHAUSTED, "", None),
    "queue_full": (_Code.RESOURCE_EXHAUSTED, "", RETRY_AFTER_S),
    "unavailable": (_Code.UNAVAILABLE, "", RETRY_AFTER_S),
    "invalid": (_Code.INVALID_ARGUMENT, "", None),
}

_IMAGE_CAUSES: dict[str, tuple[grpc.StatusCode, str, float | None]] = {
    # cause of `vision_failed`, where the image is not to blame: status, field, advice to retry
    ImageCause.INTERNAL: (_Code.INTERNAL, "", None),
    ImageCause.WORKER_LOST: (_Code.INTERNAL, "", None),  # it may be to blame, but workers should outlive any image
    ImageCause.ARENA_FULL: (_Code.RESOURCE_EXHAUSTED, "", RETRY_AFTER_S),
    ImageCause.MEMORY_FULL: (_Code.RESOURCE_EXHAUSTED, "", RETRY_AFTER_S),
    ImageCause.NOT_ALLOWED: (_Code.PERMISSION_DENIED, "images", None),
}
_IMAGE_AT_FAULT = (_Code.INVALID_ARGUMENT, "images", None)

_GRAMMAR_AT_FAULT = ("no token continues the grammar", "the grammar cannot go on")
"""How details of `structured_output_failed` begin where the grammar was built, but cannot go on from the output so far:
the engine's words, and those of the model worker's `grammar.py`."""


def rejection_error(rejected: Rejected) -> RequestError:
    """The status for a sequence that never entered the queue."""
    code, field, retry_after_s = _REJECTIONS[rejected.code]
    return RequestError(code, rejected.detail, field, retry_after_s)


def finished_event(row: FinishedRow, index: int, stop_match: str = "") -> pb.GenerateEvent:
    """The one `finished` event of continuation `index`. `stop_match`: the stop string that ended it, if one did."""
    usage = pb.Usage(
        prompt_tokens=row.prompt_tokens,
        image_tokens=row.image_tokens,
        completion_tokens=row.completion_tokens,
        cached_tokens=row.cached_tokens,
        draft_tokens=row.draft_tokens,
        accepted_tokens=row.accepted_tokens,
    )
    timings = pb.Timings(
        queued_s=row.queued_s,
        time_to_first_token_s=row.time_to_first_token_s,
        decode_s=row.decode_s,
        preemptions=row.preemptions,
        vision_wait_s=row.vision_wait_s,
        prefill_s=row.prefill_s,
        preempted_s=row.preempted_s,
    )
    finished = pb.Finished(
        reason=row.reason, detail=_detail(row), usage=usage, timings=timings, index=index, stop_match=stop_match
    )
    return pb.GenerateEvent(finished=finished)


def stopped_row(row: FinishedRow, stop_match: str, num_tokens: int) -> FinishedRow:
    """The end of a sequence whose text a stop string ended, whatever the engine says: it may have gone on for a bit."""
    return dataclasses.replace(row, reason="stop", detail=stop_detail(stop_match), completion_tokens=num_tokens)


def stop_detail(stop_match: str) -> str:
    """What happened, in words."""
    return f"stop string {stop_match!r}"


def finish_error(row: FinishedRow) -> RequestError | None:
    """The status after a `finished` event; None: OK."""
    detail = _detail(row) or row.reason
    match row.reason:
        case "stop" | "length":
            return None
        case "abort":
            return _abort_error(detail)
        case "prompt_length_exceeded":
            return RequestError(_Code.INVALID_ARGUMENT, detail, "prompt")
        case "insufficient_system_resource":
            return RequestError(_Code.RESOURCE_EXHAUSTED, detail, retry_after_s=RETRY_AFTER_S)
        case "vision_failed":
            return image_error(row.image_cause, detail)
        case "structured_output_failed":
            return _structure_error(detail)
        case _:
            return RequestError(_Code.INTERNAL, f"{row.reason}: {detail}")


def lost_row(detail: str, prompt_tokens: int, completion_tokens: int) -> FinishedRow:
    """The end of an accepted sequence whose controller is gone: nobody else will say it. Times are unknown."""
    return FinishedRow(
        seq_id=0,
        reason="abort",
        detail=detail,
        prompt_tokens=prompt_tokens,
        image_tokens=0,
        completion_tokens=completion_tokens,
        preemptions=0,
        queued_s=0.0,
        time_to_first_token_s=0.0,
        decode_s=0.0,
    )


def lost_error(detail: str) -> RequestError:
    """The status when the controller is gone."""
    return unavailable(f"{detail}; send the request again")


def _detail(row: FinishedRow) -> str:
    """What happened, with the remedy where those who say it know of none."""
    if row.reason == "prompt_length_exceeded" and row.image_tokens:
        return f"{row.detail}; {row.image_tokens} of its tokens are of images: send fewer or smaller ones"
    if row.reason == "vision_failed" and row.image_cause == ImageCause.WORKER_LOST:
        return f"{row.detail}; save the picture anew, or smaller"
    return row.detail


def _abort_error(detail: str) -> RequestError:
    match AbortCause.of(detail):
        case AbortCause.DEADLINE:
            return RequestError(_Code.DEADLINE_EXCEEDED, detail)
        case AbortCause.SHUTDOWN:
            return unavailable(detail)
        case AbortCause.MODEL_FAILED:
            return RequestError(_Code.INTERNAL, detail)
        case _:
            return RequestError(_Code.CANCELLED, detail)


def image_error(cause: str, detail: str) -> RequestError:
    """The status where an image is why nothing came of a request."""
    code, field, retry_after_s = _IMAGE_CAUSES.get(cause, _IMAGE_AT_FAULT)
    return RequestError(code, detail, field, retry_after_s)


def _structure_error(detail: str) -> RequestError:
    """The grammar was checked before the request was accepted, so a build that fails is the server's fault.

    One that allows no token where the output has got to, or grows beyond all limits there, is what was asked for: in
    itself, or together with `min_tokens`, `allowed_token_ids`, or a vocabulary without the tokens that it needs.
    """
    if detail.startswith(_GRAMMAR_AT_FAULT):
        return RequestError(_Code.FAILED_PRECONDITION, detail, "structure")
    return RequestError(_Code.INTERNAL, detail)
