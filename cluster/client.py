"""A small gRPC client of a running server, for the command line, the demo and the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import ControlStub, InferenceStub

DEFAULT_ADDRESS = "127.0.0.1:50051"
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a server that is starting is asked again soon
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate; None and nothing leave the choice to the server. Fields as in `airside.v1`.

    One of `json_schema`, `json_object`, `regex`, `choices`, `lark` and `gbnf` may be given: the form that the text must
    have.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_strings: Sequence[str] = ()
    logprobs: int | None = None
    n: int | None = None
    user: str = ""
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choices: Sequence[str] = ()
    lark: str | None = None
    gbnf: str | None = None

    def sampling(self) -> pb.Sampling:
        """As the sampling part of a request."""
        return pb.Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )

    def stop(self) -> pb.Stop:
        """As the stop part of a request."""
        return pb.Stop(max_tokens=self.max_tokens, strings=self.stop_strings)

    def output(self) -> pb.Output:
        """As the output part of a request."""
        return pb.Output(logprobs=self.logprobs)

    def structure(self) -> pb.Structure | None:
        """The form that the text must have; None: any. Raises ValueError when several are given."""
        forms = {
            "json_schema": self.json_schema,
            "json_object": self.json_object or None,
            "regex": self.regex,
            "choice": pb.Choice(texts=self.choices) if self.choices else None,
            "lark": self.lark,
            "gbnf": self.gbnf,
        }
        given = {name: form for name, form in forms.items() if form is not None}
        if len(given) > 1:
            raise ValueError(f"at most one of {', '.join(forms)} may be given, not {' and '.join(given)}")
        return pb.Structure(**given) if given else None  # type: ignore[arg-type]


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
        self, prompt: str, images: Sequence[bytes] = (), options: Options | None = None, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateEvent]:
        """Streams the events of one request. `prompt` holds one image mark per image file in `images`."""
        chosen = options or Options()
        request = pb.GenerateRequest(
            prompt=prompt,
            images=[pb.Image(data=data) for data in images],
            sampling=chosen.sampling(),
            stop=chosen.stop(),
            output=chosen.output(),
            structure=chosen.structure(),
            user=chosen.user,
            n=chosen.n,
        )
        yield from self._inference.Generate(request, timeout=timeout_s)

    def chat(
        self, messages: Sequence[pb.ChatMessage], options: Options | None = None, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateEvent]:
        """Streams the events of one request made of chat messages; see `user_message`."""
        chosen = options or Options()
        request = pb.ChatRequest(
            messages=messages,
            sampling=chosen.sampling(),
            stop=chosen.stop(),
            output=chosen.output(),
            structure=chosen.structure(),
            user=chosen.user,
            n=chosen.n,
        )
        yield from self._inference.Chat(request, timeout=timeout_s)

    def info(self, timeout_s: float = 5.0) -> pb.ServerInfo:
        """What is served, its state and its gauges."""
        return self._control.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)

    def list_workers(self, timeout_s: float = 5.0) -> pb.ListWorkersReply:
        """Every process of the server."""
        return self._control.ListWorkers(pb.ListWorkersRequest(), timeout=timeout_s)

    def scale_vision(self, replicas: int, timeout_s: float = 5.0) -> int:
        """Asks for this many vision workers; returns at once with the number that was taken on."""
        return self._control.ScaleVision(pb.ScaleVisionRequest(replicas=replicas), timeout=timeout_s).replicas

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


def user_message(text: str, images: Sequence[bytes] = ()) -> pb.ChatMessage:
    """A user's chat message: the images first, then the text."""
    parts = [pb.Part(image=pb.Image(data=data)) for data in images]
    return pb.ChatMessage(role="user", parts=[*parts, pb.Part(text=text)])
