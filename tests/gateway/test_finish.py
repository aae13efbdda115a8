"""Statuses come from what others say of an end: its reason, and the cause behind that."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from airside.controller.gateway.errors import RequestError
from airside.controller.gateway.finish import finish_error, finished_event, lost_row
from airside.proto.abort_cause import AbortCause
from airside.proto.image_cause import ImageCause
from airside.workers.grammar import CANNOT_GO_ON

_CODES = {
    AbortCause.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    AbortCause.SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
    AbortCause.MODEL_FAILED: grpc.StatusCode.INTERNAL,
}


def error_of(reason: str, detail: str, image_cause: str = "") -> RequestError:
    row = lost_row(detail, prompt_tokens=1, completion_tokens=0)
    error = finish_error(dataclasses.replace(row, reason=reason, image_cause=image_cause))
    assert error is not None
    assert error.message.startswith(detail or reason)
    return error


def code(reason: str, detail: str) -> grpc.StatusCode:
    return error_of(reason, detail).code


@pytest.mark.parametrize("cause", AbortCause)
@pytest.mark.parametrize("more", ["", ": deadline, server is shutting down"])
def test_an_abort_has_the_status_of_its_cause(cause: AbortCause, more: str) -> None:
    assert code("abort", f"{cause}{more}") == _CODES.get(cause, grpc.StatusCode.CANCELLED)


@pytest.mark.parametrize("cause", ["one of a newer worker", *ImageCause])
def test_a_picture_is_at_fault_unless_the_cause_lies_with_the_server(cause: str) -> None:
    codes = {
        ImageCause.INTERNAL: grpc.StatusCode.INTERNAL,
        ImageCause.WORKER_LOST: grpc.StatusCode.INTERNAL,
        ImageCause.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
        ImageCause.ARENA_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        ImageCause.MEMORY_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    error = error_of("vision_failed", "image 3: truncated: internal: the vision worker died on it", cause)
    assert error.code == codes.get(cause, grpc.StatusCode.INVALID_ARGUMENT), "details are for people"  # type: ignore[call-overload]
    assert (error.field == "images") == (cause not in codes or cause == ImageCause.NOT_ALLOWED)
    assert (error.retry_after_s is not None) == (error.code is grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("reason", "detail", "remedy"),
    [
        ("prompt_length_exceeded", "9 > 8", "7 of its tokens are of images: send fewer or smaller ones"),
        ("vision_failed", "image 3: vision worker lost: two died on it", "save the picture anew, or smaller"),
    ],
)
def test_event_and_status_tell_the_same_remedy(reason: str, detail: str, remedy: str) -> None:
    row = dataclasses.replace(lost_row(detail, 9, 0), reason=reason, image_tokens=7, image_cause="worker_lost")
    error = finish_error(row)
    assert error is not None
    assert error.message == finished_event(row, 0).finished.detail == f"{detail}; {remedy}"


@pytest.mark.parametrize("why", [": why", " from the output so far: why"])
def test_a_grammar_that_cannot_go_on_is_what_was_asked_for(why: str) -> None:
    assert code("structured_output_failed", CANNOT_GO_ON + why) == grpc.StatusCode.FAILED_PRECONDITION
    assert code("structured_output_failed", f"why: {CANNOT_GO_ON}") == grpc.StatusCode.INTERNAL
