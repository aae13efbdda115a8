"""The Inference service: checks a request, gives it to the controller, streams what comes back."""

# Names and arguments of the methods are gRPC's.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence

import grpc
from tokenizers import Encoding

from airside.controller.gateway import request_checks as checks
from airside.controller.gateway.chat_checks import check_chat
from airside.controller.gateway.continuation import Continuation
from airside.controller.gateway.controller_link import ControllerLink
from airside.controller.gateway.errors import Context, RequestError, answered, invalid
from airside.controller.gateway.finish import image_error, rejection_error
from airside.controller.gateway.grammar_check import GrammarChecker
from airside.controller.gateway.image_sources import ImageSources, read_images
from airside.controller.gateway.prompt import Prompt, hash_images
from airside.controller.gateway.relay import Relay
from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.terms import Terms, TermsReader
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import airside_pb2_grpc as pb_grpc
from airside.proto.abort_cause import AbortCause
from airside.proto.messages import CountImages, ImagesCounted, Rejected
from airside.proto.settings import GatewaySettings

_EARLY_S = 0.1
"""A client whose deadline has passed hangs up, and that may be heard before the same deadline has passed here."""

_ANY_LENGTH = 1 << 62  # of a context
_THREAD_CHARS = 16_384  # longer texts are tokenized in a thread, so that they do not hold up everybody's tokens
_PIECE_TOKENS = 1024  # some ms of making text of them; between two pieces, others have their turn


class Inference(pb_grpc.InferenceServicer):
    """`airside.v1.Inference`.

    A sequence's id is 31 random bits of this process, then a counter, so that those of several gateways never meet.
    Events are written to the context rather than yielded: so a cancel arrives here, whatever is being waited for.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: TextModel,
        link: ControllerLink,
        grammars: GrammarChecker,
        metrics: RequestMetrics,
    ) -> None:
        self._model = model
        self._link = link
        self._grammars = grammars
        self._metrics = metrics
        self._terms = TermsReader(settings, model)
        self._limits = checks.ImageLimits(
            model.image_mark_id,
            model.image_mark,
            settings.max_images_per_prompt,
            settings.max_image_bytes,
            settings.allow_urls,
            model.picture_ids,
            settings.takes_pixel_ranges,
        )
        self._seq_ids = itertools.count(secrets.randbits(31) << 32)
        self._num_under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def drained(self) -> None:
        """Waits until no text is being made, nor a request for one checked."""
        await self._idle.wait()

    @answered
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Streams continuations of a prompt."""
        with self._under_way():
            with self._checking(context):
                terms = self._read_terms(request, context)
                prompt = await self._generate_prompt(request, self._link.ready_state().max_model_len)
                terms, prompt = await self._checked(request, terms, prompt)
            await self._stream(terms, prompt, context)

    @answered
    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Streams the assistant's next message."""
        with self._under_way():
            with self._checking(context):
                terms = self._read_terms(request, context)
                prompt = await self._chat_prompt(request, self._link.ready_state().max_model_len)
                terms, prompt = await self._checked(request, terms, prompt)
            await self._stream(terms, prompt, context)

    @answered
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        """Token ids of a text. Answered in any state of the engine."""
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encoding = await self._encode(request.text, special)
        return pb.TokenizeReply(token_ids=encoding.ids, tokens=encoding.tokens)

    @answered
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeReply:
        """The text of token ids. Answered in any state of the engine."""
        token_ids = list(request.token_ids)
        checks.check_in_vocabulary("token_ids", token_ids, self._model.vocab_size)
        detokenizer, pieces = self._model.detokenizer(), []
        for begin in range(0, len(token_ids), _PIECE_TOKENS):
            pieces.append(detokenizer.push(token_ids[begin : begin + _PIECE_TOKENS]))
            await asyncio.sleep(0)  # where a call that was cancelled ends
        return pb.DetokenizeReply(text="".join([*pieces, detokenizer.flush()]))

    @answered
    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensReply:
        """How many tokens a prompt has, whether or not they fit the context. Without images in any state."""
        prompt = await self._prompt_to_count(request)
        if prompt.image_urls and any(prompt.image_urls):
            index = next(i for i, url in enumerate(prompt.image_urls) if url)
            raise invalid("images", f"image {index} has a URL, and nothing is fetched to be counted; send it as data")
        counts = await self._count_images(prompt) if prompt.images else []
        total = len(prompt.token_ids) - len(counts) + sum(counts)
        return pb.CountTokensReply(prompt_tokens=total, image_tokens=sum(counts), tokens_of_images=counts)

    async def _prompt_to_count(self, request: pb.CountTokensRequest) -> Prompt:
        if not request.messages:
            return await self._generate_prompt(request, _ANY_LENGTH)
        if request.WhichOneof("input") or request.images:
            raise invalid("messages", "come with a prompt or images of its own; send one or the other")
        return await self._chat_prompt(request, _ANY_LENGTH)

    async def _count_images(self, prompt: Prompt) -> Sequence[int]:
        def question(query_id: int) -> CountImages:
            return CountImages(query_id, prompt.min_pixels, prompt.max_pixels)

        counted = await self._link.query(question, ImagesCounted, prompt.images)
        if counted.refused == "image":
            raise image_error(counted.image_cause, counted.detail)
        if counted.refused:
            raise rejection_error(Rejected(0, counted.refused, counted.detail))
        return counted.num_tokens

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._num_under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._idle.set()

    @contextlib.contextmanager
    def _checking(self, context: Context) -> Iterator[None]:
        """Counts a deadline that ends the call in here; later ones are the controller's to tell."""
        deadline = _deadline(context)
        try:
            yield
        except asyncio.CancelledError:
            if _has_expired(deadline):
                self._metrics.deadline_expired("check")
            raise

    def _read_terms(self, request: pb.GenerateRequest | pb.ChatRequest, context: Context) -> Terms:
        deadline = _deadline(context)
        return self._terms.read(request, self._link.ready_state().max_model_len, time.time(), deadline)

    async def _checked(
        self, request: pb.GenerateRequest | pb.ChatRequest, terms: Terms, prompt: Prompt
    ) -> tuple[Terms, Prompt]:
        """Checks what takes longest, and fills it in."""
        if terms.drafts.golden_mode == "force":
            max_model_len = self._link.ready_state().max_model_len
            checks.check_golden_fits(len(terms.drafts.golden_tokens), len(prompt.token_ids), max_model_len)
        if request.HasField("structure"):
            terms = dataclasses.replace(terms, grammar=await self._grammars.check(request.structure))
        if prompt.images:
            hashes = await asyncio.to_thread(hash_images, prompt.images, prompt.image_ranges)
            prompt = dataclasses.replace(prompt, image_hashes=hashes)
        request.Clear()  # a stream may live for long, and its images are in `prompt`
        return terms, prompt

    async def _generate_prompt(self, request: pb.GenerateRequest | pb.CountTokensRequest, max_model_len: int) -> Prompt:
        fields = [f"images[{i}]" for i in range(len(request.images))]
        images = await self._read_images(request.images, fields)
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
        marks = checks.check_marks(field, token_ids, len(images.files), self._limits)
        return Prompt(token_ids, marks, images.files, images.urls, image_ranges=images.ranges)

    async def _chat_prompt(self, request: pb.ChatRequest | pb.CountTokensRequest, max_model_len: int) -> Prompt:
        if not self._model.has_chat_template:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION, "this checkpoint has no chat template; use Generate", "messages"
            )
        chat = check_chat(request.messages, self._limits)
        images = await self._read_images(chat.images, chat.fields)
        text = self._model.render_chat(chat.messages)
        checks.check_text_length("messages", text, self._model.token_chars_max, max_model_len)
        token_ids = (await self._encode(text, add_special_tokens=False)).ids
        checks.check_length("messages", len(token_ids), max_model_len)
        marks = checks.check_marks("messages", token_ids, len(images.files), self._limits)
        return Prompt(token_ids, marks, images.files, images.urls, image_ranges=images.ranges)

    async def _read_images(self, images: Sequence[pb.Image], fields: Sequence[str]) -> ImageSources:
        if sum(len(image.data_uri) + len(image.url) for image in images) <= _THREAD_CHARS:
            return read_images(images, fields, self._limits)
        return await asyncio.to_thread(read_images, images, fields, self._limits)

    async def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) <= _THREAD_CHARS:
            return self._model.encode(text, add_special_tokens)
        return await asyncio.to_thread(self._model.encode, text, add_special_tokens)

    async def _stream(self, terms: Terms, prompt: Prompt, context: Context) -> None:
        """Runs the sequences. However the call ends, the controller knows of no sequence that nobody reads."""
        seq_ids = [next(self._seq_ids) for _ in range(terms.n)]
        continuations = [
            Continuation(index, terms, prompt, self._model, functools.partial(self._link.stop, seq_id))
            for index, seq_id in enumerate(seq_ids)
        ]
        accepted = terms.accepted(len(prompt.token_ids))
        relay = Relay(accepted, continuations, context.write, self._metrics, terms.arrival)
        inbox = self._link.streams.open(seq_ids, terms.arrival)
        try:
            for index, seq_id in enumerate(seq_ids):
                self._link.send(terms.add_request(seq_id, index, prompt), prompt.images)
            self._metrics.images_came(prompt.images)
            prompt.images.clear()
            await relay.run(inbox)
        finally:
            self._link.streams.close(seq_ids)
            relay.abandon()
            expired = _has_expired(terms.deadline)
            for index in sorted(relay.unended):
                self._link.abort(seq_ids[index], AbortCause.DEADLINE if expired else AbortCause.CLIENT_GONE)


def _deadline(context: Context) -> float | None:
    """Unix time at which the client gives the call up."""
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None else time.time() + remaining_s


def _has_expired(deadline: float | None) -> bool:
    """Of a call that has ended by itself."""
    return deadline is not None and time.time() >= deadline - _EARLY_S
