"""A gRPC client that knows nothing of Airside but a description of its API."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2
from grpc_status import rpc_status

PROTO = Path(__file__).resolve().parents[2] / "proto" / "airside.proto"


def pool_from_proto_file(build_dir: Path) -> DescriptorPool:
    """Descriptors compiled by protoc from airside.proto, and from nothing else."""
    out = build_dir / "airside.desc"
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO.parent}",
        f"--descriptor_set_out={out}",
        PROTO.name,
    ]
    subprocess.run(command, check=True, timeout=60)
    pool = DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)
    return pool


class OneReply:
    """A call with one reply, in progress."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self, timeout: float) -> Any:
        """Waits for the reply. Raises grpc.RpcError."""
        return self._future.result(timeout)


class Client:
    """Calls by method name, with requests as dictionaries. Any: message classes are made at run time."""

    def __init__(self, pool: Any, channel: grpc.Channel) -> None:
        self._pool = pool
        self._channel = channel

    def generate(self, timeout: float | None = None, **fields: Any) -> Any:
        """Starts a Generate call; iterate over it for the events."""
        return self._stream("Generate", fields, timeout)

    def chat(self, timeout: float | None = None, **fields: Any) -> Any:
        """Starts a Chat call."""
        return self._stream("Chat", fields, timeout)

    def start(self, service: str, method: str, **fields: Any) -> Any:
        """Starts a call with one reply; ask it for its result()."""
        path, request, reply = self._method(service, method)
        call = self._channel.unary_unary(path, request_serializer=_serialize, response_deserializer=reply.FromString)
        return OneReply(call.future(_filled(request, fields), timeout=30))

    def _stream(self, method: str, fields: dict[str, Any], timeout: float | None) -> Any:
        path, request, reply = self._method("Inference", method)
        call = self._channel.unary_stream(path, request_serializer=_serialize, response_deserializer=reply.FromString)
        return call(_filled(request, fields), timeout=timeout)

    def _method(self, service: str, method: str) -> tuple[str, Any, Any]:
        descriptor = self._pool.FindServiceByName(f"airside.v1.{service}").FindMethodByName(method)
        classes = (message_factory.GetMessageClass(kind) for kind in (descriptor.input_type, descriptor.output_type))
        return f"/airside.v1.{service}/{method}", *classes


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _filled(request: Any, fields: dict[str, Any]) -> Any:
    return json_format.ParseDict(fields, request())


@dataclass(frozen=True)
class Failure:
    """How a call failed. `fields`: those at fault, by the details."""

    code: grpc.StatusCode
    message: str
    fields: list[str]
    retry_after_s: float | None


def failure(call: Any) -> Failure:
    """Waits for a call to fail: a stream, or one with one reply."""
    with pytest.raises(grpc.RpcError) as caught:
        _ = call.result(timeout=30) if isinstance(call, OneReply) else list(call)
    return _read(caught.value)


def events_and_failure(call: Any) -> tuple[list[Any], Failure]:
    """All events of a stream that ends with an error, and the error."""
    events: list[Any] = []
    try:
        events.extend(event for event in call)
    except grpc.RpcError as error:
        return events, _read(error)
    raise AssertionError("the call ended well")


def _read(error: Any) -> Failure:
    status = rpc_status.from_call(error)
    fields: list[str] = []
    retry_after_s = None
    for detail in status.details if status is not None else ():
        violations, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(violations):
            fields += [violation.field for violation in violations.field_violations]
            assert all(violation.description == error.details() for violation in violations.field_violations)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return Failure(error.code(), error.details(), fields, retry_after_s)
