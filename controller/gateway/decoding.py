"""Bytes that are no message of the API's: an answer to the client, where the gRPC runtime would only log a failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError


@dataclass(frozen=True, slots=True)
class Undecodable:
    """In a request's place: the bytes could not be decoded. Refused by `errors.answered`."""

    why: str


class TolerantDecoding(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Hands `Undecodable` to the methods of one package instead of failing before they are called.

    Args:
        package: whose methods expect that, e.g. `airside.v1`.
    """

    def __init__(self, package: str) -> None:
        self._prefix = f"/{package}."

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:  # Any: gRPC's handlers are named tuples without a public type
        """The method's handler, with a decoder that does not raise."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        return handler._replace(request_deserializer=_tolerant(handler.request_deserializer))


def _tolerant(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def try_decode(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError as error:
            return Undecodable(str(error))

    return try_decode
