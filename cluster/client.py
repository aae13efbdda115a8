"""A small gRPC client of a running server, for the command line, the demo and the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from airside.cluster.image_source import ImageSource, to_image
from airside.cluster.sampling_params import SamplingParams
from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import ControlStub, InferenceStub

DEFAULT_ADDRESS = "127.0.0.1:50051"
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a server that is starting is asked again soon
    ("grpc.max_reconnect_backoff_ms", 500),
]

_DEFAULTS = SamplingParams()


class Client:
    """One connection to a server. Methods raise grpc.RpcError, with the status that the server gave.

    Args:
        address: host:port.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)
        self._control = ControlStub(self._channel)

    def generate(
        self,
        prompt: str,
        images: Sequence[ImageSource] = (),
        params: SamplingParams = _DEFAULTS,
        timeout_s: float | None = None,
    ) -> Iterator[pb.GenerateEvent]:
        """Streams the events of one request. `prompt` holds one image mark per picture in `images`."""
        request = params.fill(pb.GenerateRequest(prompt=prompt, images=[to_image(image) for image in images]))
        yield from self._inference.Generate(request, timeout=timeout_s)

    def chat(
        self, messages: Sequence[pb.ChatMessage], params: SamplingParams = _DEFAULTS, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateEvent]:
        """Streams the events of one request made of chat messages; see `user_message`."""
        yield from self._inference.Chat(params.fill(pb.ChatRequest(messages=messages)), timeout=timeout_s)

    def info(self, timeout_s: float = 5.0) -> pb.ServerInfo:
        """What is served, its state and its gauges."""
        return self._control.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)

    def list_workers(self, timeout_s: float = 5.0) -> pb.ListWorkersReply:
        """Every process of the server."""
        return self._control.ListWorkers(pb.ListWorkersRequest(), timeout=timeout_s)

    def scale_vision(
        self, replicas: int, replicas_max: int | None = None, timeout_s: float = 5.0
    ) -> pb.ScaleVisionReply:
        """Asks for this many vision workers, or for a range within which the load decides; returns at once."""
        if replicas_max is None:
            request = pb.ScaleVisionRequest(replicas=replicas)
        else:
            request = pb.ScaleVisionRequest(range=pb.Range(min=replicas, max=replicas_max))
        return self._control.ScaleVision(request, timeout=timeout_s)

    def abort(self, request_id: str, timeout_s: float = 5.0) -> str:
        """Ends a request: "aborted", "already_finished" or "unknown"."""
        return self._control.Abort(pb.AbortRequest(request_id=request_id), timeout=timeout_s).outcome

    def close(self) -> None:
        """Disconnects; streams that are open end with CANCELLED."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def user_message(text: str, images: Sequence[ImageSource] = ()) -> pb.ChatMessage:
    """A user's chat message: the images first, then the text."""
    parts = [pb.Part(image=to_image(image)) for image in images]
    return pb.ChatMessage(role="user", parts=[*parts, pb.Part(text=text)])
