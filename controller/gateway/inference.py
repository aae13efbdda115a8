"""The Inference service: checks a request, gives it to the controller, streams what comes back."""

# Names and arguments of the methods are gRPC's.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from tokenizers import Encoding

from airside.controller.gateway import request_checks as checks
from airside.controller.gateway.controller_link import ControllerLink
from airside.controller.gateway.errors import Context, RequestError, answered, invalid
from airside.controller.gateway.relay import Relay
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import airside_pb2_grpc as pb_grpc
from airside.proto.messages import AddRequest
from airside.proto.settings import GatewaySettings

_THREAD_CHARS = 16_384  # longer texts are tokenized in a thread, so that they do not hold up everybody's tokens


@dataclass(frozen=True, slots=True)
class _Terms:
    """All of a request but its prompt."""

    request_id: str
    sampling: checks.SamplingValues
    stop: checks.StopValues
    priority: int
    arrival: float  # unix time
    deadline: float | None  # unix time


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A tokenized prompt and its image files."""

    token_ids: Sequence[int]
    image_positions: list[int]
    images: list[bytes]


class Inference(pb_grpc.InferenceServicer):
    """`airside.v1.Inference`.

    A sequence's id is 31 random bits of this process, then a counter, so that those of several gateways never meet.
    Events are written to the context rather than yielded: so a cancel arrives here, whatever is being waited for.
    """

    def __init__(self, settings: GatewaySettings, model: TextModel, link: ControllerLink) -> None:
        self._model = model
        self._link = link
        self._defaults = model.defaults.overridden(settings.generation_defaults)
        self._limits = checks.ImageLimits(
            model.image_mark_id, model.image_mark, settings.max_images_per_prompt, settings.max_image_bytes
        )
        self._seq_ids = itertools.count(secrets.randbits(31) << 32)

    @answered
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Streams the continuation of a prompt."""
        terms = self._terms(request, context)
        prompt = await self._generate_prompt(request, self._link.ready_state().max_model_len)
        request.Clear()  # a stream may live for long, and its images are in `prompt`
        await self._stream(terms, prompt, context)

    @answered
    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Streams the assistant's next message."""
        terms = self._terms(request, context)
        prompt = await self._chat_prompt(request, self._link.ready_state().max_model_len)
        request.Clear()
        await self._stream(terms, prompt, context)

    @answered
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        """Token ids of a text. Answered in any state of the engine."""
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encoding = await self._encode(request.text, special)
        return pb.TokenizeReply(token_ids=encoding.ids, tokens=encoding.tokens)

    def _terms(self, request: pb.GenerateRequest | pb.ChatRequest, context: Context) -> _Terms:
        arrival = time.time()
        max_model_len = self._link.ready_state().max_model_len
        remaining_s: float | None = context.time_remaining()
        return _Terms(
            request_id=checks.check_request_id(request.request_id),
            sampling=checks.check_sampling(request.sampling, self._defaults),
            stop=checks.check_stop(request.stop, self._model.end_ids, self._model.vocab_size, max_model_len),
            priority=request.priority,
            arrival=arrival,
            deadline=None if remaining_s is None else arrival + remaining_s,
        )

    async def _generate_prompt(self, request: pb.GenerateRequest, max_model_len: int) -> _Prompt:
        fields = [f"images[{i}]" for i in range(len(request.images))]
        images = checks.check_images(request.images, fields, self._limits)
        token_ids: Sequence[int]
        match request.WhichOneof("input"):
            case "prompt":
                field = "prompt"
                if not request.prompt:
                    raise invalid(field, "is empty; send a text or token_ids")
                checks.check_text_length(field, request.prompt, self._model.token_chars_max, max_model_len)
                token_ids = (await self._encode(request.prompt, add_special_tokens=True)).ids
            case "token_ids":
                field, token_ids = "token_ids.ids", list(request.token_ids.ids)
                checks.check_in_vocabulary(field, token_ids, self._model.vocab_size)
            case _:
                raise invalid("prompt", "is missing; send either prompt or token_ids")
        checks.check_length(field, len(token_ids), max_model_len)
        return _Prompt(token_ids, checks.check_marks(field, token_ids, len(images), self._limits), images)

    async def _chat_prompt(self, request: pb.ChatRequest, max_model_len: int) -> _Prompt:
        if not self._model.has_chat_template:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION, "this checkpoint has no chat template; use Generate", "messages"
            )
        chat = checks.check_chat(request.messages, self._limits)
        images = checks.check_images(chat.images, chat.fields, self._limits)
        text = self._model.render_chat(chat.messages)
        checks.check_text_length("messages", text, self._model.token_chars_max, max_model_len)
        token_ids = (await self._encode(text, add_special_tokens=False)).ids
        checks.check_length("messages", len(token_ids), max_model_len)
        return _Prompt(token_ids, checks.check_marks("messages", token_ids, len(images), self._limits), images)

    async def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) <= _THREAD_CHARS:
            return self._model.encode(text, add_special_tokens)
        return await asyncio.to_thread(self._model.encode, text, add_special_tokens)

    async def _stream(self, terms: _Terms, prompt: _Prompt, context: Context) -> None:
        """Runs one sequence. However the call ends, the controller knows of no sequence that nobody reads."""
        seq_id = next(self._seq_ids)
        accepted = pb.Accepted(
            request_id=terms.request_id, seed=terms.sampling.seed, prompt_tokens=len(prompt.token_ids)
        )
        relay = Relay(accepted, self._model.detokenizer(), context.write)
        stream = self._link.streams.open(seq_id)
        try:
            self._link.send(_add_request(seq_id, terms, prompt), prompt.images)
            prompt.images.clear()
            await relay.run(stream)
        finally:
            self._link.streams.close(seq_id)
            if not relay.ended:
                expired = terms.deadline is not None and time.time() >= terms.deadline
                self._link.abort(seq_id, "deadline exceeded" if expired else "the client cancelled or is gone")


def _add_request(seq_id: int, terms: _Terms, prompt: _Prompt) -> AddRequest:
    return AddRequest(
        seq_id=seq_id,
        request_id=terms.request_id,
        token_ids=np.asarray(prompt.token_ids, "<i4").tobytes(),
        image_positions=prompt.image_positions,
        arrival=terms.arrival,
        priority=terms.priority,
        deadline=terms.deadline,
        max_tokens=terms.stop.max_tokens,
        min_tokens=terms.stop.min_tokens,
        stop_token_ids=terms.stop.token_ids,
        temperature=terms.sampling.temperature,
        top_k=terms.sampling.top_k,
        top_p=terms.sampling.top_p,
        min_p=terms.sampling.min_p,
        seed=terms.sampling.seed,
    )
