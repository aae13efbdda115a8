"""What can go wrong in a gateway, and what a client is told about it.

GatewayError
├── RequestError          the call ends with a status; says which field, and what to do
├── ControllerSilent      the controller does not answer, or takes nothing more
├── ModelFilesError       the checkpoint has no text side that can be used; the process does not start
└── AddressBusy           the port cannot be bound; the process does not start
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from airside.controller.gateway.decoding import Undecodable

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""What clients are advised to wait where waiting helps."""

MESSAGE_CHARS_MAX = 400
"""Of a status message. It travels three times in headers, for which gRPC allows 8 KB in all."""

Context = grpc.aio.ServicerContext[Any, Any]
"""The call's context. Any: nothing here looks at the messages."""

_Servicer = TypeVar("_Servicer")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Method: TypeAlias = Callable[[_Servicer, _Request, Context], Coroutine[Any, Any, _Reply]]


class GatewayError(Exception):
    """Base of this package's errors."""


class RequestError(GatewayError):
    """A call that ends with a status other than OK.

    Args:
        code: the gRPC status.
        message: one sentence for a person: what is wrong, the limit and the actual value, and the remedy.
        field: path of the request's field at fault, e.g. `images[1].data`; empty when it is not the request's fault.
        retry_after_s: advice to try again after so long; None where the same call would fail again.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, field: str = "", retry_after_s: float | None = None
    ) -> None:
        shown = message if len(message) <= MESSAGE_CHARS_MAX else message[:MESSAGE_CHARS_MAX] + "…"
        super().__init__(shown)
        self.code = code
        self.message = shown
        self.field = field
        self.retry_after_s = retry_after_s

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The rich details: `google.rpc.BadRequest` for a field, `google.rpc.RetryInfo` for advice."""
        details: list[any_pb2.Any] = []
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(self.retry_after_s * 1000))
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        number = self.code.value[0]
        status = rpc_status.to_status(status_pb2.Status(code=number, message=self.message, details=details))
        metadata: tuple[tuple[str, str | bytes], ...] = status.trailing_metadata
        return metadata


class ControllerSilent(GatewayError):
    """The controller does not answer, or takes nothing more."""


class ModelFilesError(GatewayError):
    """The checkpoint lacks what the text side needs; the message says which file."""


class AddressBusy(GatewayError):
    """The address to listen on cannot be bound."""


def invalid(field: str, message: str) -> RequestError:
    """An INVALID_ARGUMENT for one field; the message is led by the field's name."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}", field)


def unavailable(message: str) -> RequestError:
    """An UNAVAILABLE with the advice to try again."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)


def answered(method: _Method[_Servicer, _Request, _Reply]) -> _Method[_Servicer, _Request, _Reply]:
    """Decorator of a servicer's method: errors become statuses; one nobody foresaw, INTERNAL and a log entry."""

    @functools.wraps(method)
    async def call(servicer: _Servicer, request: _Request, context: Context) -> _Reply:
        try:
            if isinstance(request, Undecodable):
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be decoded: {request.why}")
            return await method(servicer, request, context)
        except RequestError as known:
            error = known
        except ControllerSilent as silent:
            error = unavailable(str(silent))
        except Exception:
            log.exception("%s failed inside the gateway", method.__qualname__)
            error = RequestError(grpc.StatusCode.INTERNAL, "the gateway failed; its log has the cause")
        await context.abort(error.code, error.message, error.trailing_metadata())
        raise AssertionError("abort raises")

    return call


def _packed(message: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
