"""Everything that is checked before a request reaches the controller.

Each check returns what it checked in the form that is used from here on, or raises a `RequestError` which names the
field, the limit, the actual value and the remedy. Order: cheap ones first, tokenizing last.
"""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from airside.controller.gateway.errors import invalid
from airside.controller.gateway.generation_defaults import GenerationDefaults
from airside.proto import airside_pb2 as pb

REQUEST_ID_BYTES_MAX = 256
STOP_TOKENS_MAX = 64
TEMPERATURE_MAX = 100.0
ROLES = ("system", "user", "assistant")

_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What pictures a request may bring. `mark` is the token that stands for one; None for a text model."""

    mark_id: int | None
    mark: str
    images_max: int
    image_bytes_max: int


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Every sampling value decided."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class StopValues:
    """When a sequence ends. `max_tokens` None: when the context is full."""

    max_tokens: int | None
    min_tokens: int
    token_ids: list[int]


def check_request_id(request_id: str) -> str:
    """The id as given, or a fresh one."""
    if not request_id:
        return uuid.uuid4().hex
    size = len(request_id.encode())
    if size > REQUEST_ID_BYTES_MAX:
        raise invalid("request_id", f"has {size} bytes, at most {REQUEST_ID_BYTES_MAX} are allowed; use a shorter one")
    if not request_id.isprintable():
        bad = next(char for char in request_id if not char.isprintable())
        raise invalid("request_id", f"holds the unprintable character U+{ord(bad):04X}; use printable ones only")
    return request_id


def check_sampling(sampling: pb.Sampling, defaults: GenerationDefaults) -> SamplingValues:
    """Sampling values with the checkpoint's defaults and a seed filled in."""
    temperature = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    if not 0.0 <= temperature <= TEMPERATURE_MAX:  # false for NaN too
        raise invalid(
            "sampling.temperature", f"is {temperature:g}, but must be in [0, {TEMPERATURE_MAX:g}]; 0 is greedy"
        )
    top_k = sampling.top_k if sampling.HasField("top_k") else defaults.top_k
    if top_k < 0:
        raise invalid("sampling.top_k", f"is {top_k}, but must be at least 0; 0 keeps all tokens")
    top_p = sampling.top_p if sampling.HasField("top_p") else defaults.top_p
    if not 0.0 < top_p <= 1.0:
        raise invalid("sampling.top_p", f"is {top_p:g}, but must be in (0, 1]; 1 keeps all tokens")
    min_p = sampling.min_p if sampling.HasField("min_p") else defaults.min_p
    if not 0.0 <= min_p <= 1.0:
        raise invalid("sampling.min_p", f"is {min_p:g}, but must be in [0, 1]; 0 keeps all tokens")
    assert math.isfinite(temperature)
    seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(63)
    return SamplingValues(temperature, top_k, top_p, min_p, seed)


def check_stop(stop: pb.Stop, end_ids: Sequence[int], vocab_size: int, max_model_len: int) -> StopValues:
    """When to end: the request's own tokens, and the model's unless they are to be ignored."""
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        raise invalid("stop.max_tokens", f"is {max_tokens}, but must be at least 1; leave it out for no limit")
    if stop.min_tokens < 0:
        raise invalid("stop.min_tokens", f"is {stop.min_tokens}, but must be at least 0")
    if stop.min_tokens >= max_model_len:
        raise invalid("stop.min_tokens", f"is {stop.min_tokens}, but the context holds {max_model_len} tokens in all")
    if max_tokens is not None and stop.min_tokens > max_tokens:
        raise invalid("stop.min_tokens", f"is {stop.min_tokens}, more than the {max_tokens} of stop.max_tokens")
    if len(stop.token_ids) > STOP_TOKENS_MAX:
        raise invalid("stop.token_ids", f"has {len(stop.token_ids)} ids, at most {STOP_TOKENS_MAX} are allowed")
    check_in_vocabulary("stop.token_ids", stop.token_ids, vocab_size)
    chosen = {*stop.token_ids} if stop.ignore_eos else {*stop.token_ids, *end_ids}
    return StopValues(max_tokens, stop.min_tokens, sorted(chosen))


def check_in_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Every id is in [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise invalid(f"{field}[{index}]", f"is {token_id}, but this model's token ids are in [0, {vocab_size})")


def check_images(images: Sequence[pb.Image], fields: Sequence[str], limits: ImageLimits) -> list[bytes]:
    """The image files. `fields` has the path of each image in the request."""
    if images and limits.mark_id is None:
        raise invalid(fields[0], "this model takes text only; send the request without images")
    if len(images) > limits.images_max:
        raise invalid(
            fields[limits.images_max], f"the request has {len(images)} images, at most {limits.images_max} are allowed"
        )
    for image, field in zip(images, fields, strict=True):
        if not image.data:
            raise invalid(f"{field}.data", "is empty; send the bytes of an image file")
        if len(image.data) > limits.image_bytes_max:
            raise invalid(
                f"{field}.data",
                f"has {len(image.data)} bytes, at most {limits.image_bytes_max} are allowed; send a smaller file",
            )
    return [image.data for image in images]


def check_marks(field: str, token_ids: Sequence[int], num_images: int, limits: ImageLimits) -> list[int]:
    """Positions of the image marks, one per image. `field` is where the prompt came from."""
    if limits.mark_id is None:
        return []
    positions = [i for i, token_id in enumerate(token_ids) if token_id == limits.mark_id]
    if len(positions) != num_images:
        raise invalid(
            field,
            f"has {len(positions)} image marks and the request has {num_images} images; "
            f"write {limits.mark} (token {limits.mark_id}) once for each image",
        )
    return positions


def check_text_length(field: str, text: str, token_chars_max: int, max_model_len: int) -> None:
    """Refuses unread what cannot fit whatever it tokenizes to, so that nobody can make the gateway read for minutes."""
    # No token is longer than token_chars_max; a normalizer may shorten text, but not to a quarter.
    tokens_min = len(text) // (4 * token_chars_max)
    if tokens_min > max_model_len:
        raise invalid(
            field,
            f"has {len(text)} characters, over {tokens_min} tokens, but the context holds {max_model_len}; shorten it",
        )


def check_length(field: str, num_tokens: int, max_model_len: int) -> None:
    """The prompt is not empty and leaves room in the context for a first new token."""
    if num_tokens == 0:
        raise invalid(field, "is empty; send at least one token")
    if num_tokens >= max_model_len:
        raise invalid(
            field,
            f"has {num_tokens} tokens, but the context holds {max_model_len}, at least one of them new; shorten it",
        )


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """Messages as chat templates take them; images in order, and where each was in the request."""

    messages: list[dict[str, object]]
    images: list[pb.Image]
    fields: list[str]


def check_chat(messages: Sequence[pb.ChatMessage], limits: ImageLimits) -> CheckedChat:
    """The messages of a chat.

    A text that spells the image mark is refused: the template's output is tokenized as one text, so it would stand for
    a picture that its writer did not send.
    """
    if not messages:
        raise invalid("messages", "is empty; send at least one message")
    chat = CheckedChat([], [], [])
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid(
                f"messages[{i}].role", f"is {message.role[:_SHOWN_CHARS]!r}, but must be one of {', '.join(ROLES)}"
            )
        if not message.parts:
            raise invalid(f"messages[{i}].parts", "is empty; send at least one part")
        parts = [_check_part(part, f"messages[{i}].parts[{j}]", limits, chat) for j, part in enumerate(message.parts)]
        # Templates of image models go through a list of parts, those of text models take one text.
        plain = limits.mark_id is None
        content: object = "".join(part.get("text", "") for part in parts) if plain else parts
        chat.messages.append({"role": message.role, "content": content})
    return chat


def _check_part(part: pb.Part, field: str, limits: ImageLimits, chat: CheckedChat) -> dict[str, str]:
    match part.WhichOneof("part"):
        case "text":
            if limits.mark and limits.mark in part.text:
                raise invalid(
                    f"{field}.text", f"spells {limits.mark}, which marks an image; send images as parts of their own"
                )
            return {"type": "text", "text": part.text}
        case "image":
            chat.images.append(part.image)
            chat.fields.append(f"{field}.image")
            return {"type": "image"}
        case _:
            raise invalid(field, "is empty; send a text or an image")
