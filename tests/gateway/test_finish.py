"""Statuses come from what others say of an end: the words that they use are those that are looked for."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from airside.controller.gateway.finish import finish_error, finished_event, lost_row
from airside.proto.abort_cause import AbortCause
from airside.vision_workers.image_error import Cause
from airside.workers.grammar import CANNOT_GO_ON

_CODES = {
    AbortCause.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    AbortCause.SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
    AbortCause.MODEL_FAILED: grpc.StatusCode.INTERNAL,
}


def code(reason: str, detail: str) -> grpc.StatusCode:
    row = lost_row(detail, prompt_tokens=1, completion_tokens=0)
    error = finish_error(dataclasses.replace(row, reason=reason))
    assert error is not None
    assert error.message.startswith(detail or reason)
    return error.code


@pytest.mark.parametrize("cause", AbortCause)
@pytest.mark.parametrize("more", ["", ": deadline, server is shutting down"])
def test_an_abort_has_the_status_of_its_cause(cause: AbortCause, more: str) -> None:
    assert code("abort", f"{cause}{more}") == _CODES.get(cause, grpc.StatusCode.CANCELLED)


@pytest.mark.parametrize("cause", Cause)
def test_a_picture_is_at_fault_unless_the_cause_lies_with_the_server(cause: Cause) -> None:
    others = {
        Cause.INTERNAL: grpc.StatusCode.INTERNAL,
        Cause.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
        Cause.MEMORY_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    expected = others.get(cause, grpc.StatusCode.INVALID_ARGUMENT)
    assert code("vision_failed", f"image 3: {cause}: : internal: the vision worker") == expected


def test_a_picture_that_workers_were_lost_to_is_not_the_clients_fault() -> None:
    assert code("vision_failed", "image 3: vision worker lost: two died on it") is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("reason", "detail", "remedy"),
    [
        ("prompt_length_exceeded", "9 > 8", "7 of its tokens are of images: send fewer or smaller ones"),
        ("vision_failed", "image 3: vision worker lost: two died on it", "save the picture anew, or smaller"),
    ],
)
def test_event_and_status_tell_the_same_remedy(reason: str, detail: str, remedy: str) -> None:
    row = dataclasses.replace(lost_row(detail, 9, 0), reason=reason, image_tokens=7)
    error = finish_error(row)
    assert error is not None
    assert error.message == finished_event(row, 0).finished.detail == f"{detail}; {remedy}"


@pytest.mark.parametrize("why", [": why", " from the output so far: why"])
def test_a_grammar_that_cannot_go_on_is_what_was_asked_for(why: str) -> None:
    assert code("structured_output_failed", CANNOT_GO_ON + why) == grpc.StatusCode.FAILED_PRECONDITION
    assert code("structured_output_failed", f"why: {CANNOT_GO_ON}") == grpc.StatusCode.INTERNAL
