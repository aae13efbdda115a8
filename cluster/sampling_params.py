"""`SamplingParams`: what a server or the offline `LLM` is told beside the prompt, in one flat list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from airside.controller.gateway.errors import invalid
from airside.proto import airside_pb2 as pb

Request = TypeVar("Request", pb.GenerateRequest, pb.ChatRequest)

_STRUCTURE = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")

_PLACES: dict[str, tuple[str, str]] = {
    # field: the block of GenerateRequest that it belongs to, and its name there. Others are of the request itself.
    **{
        name: ("sampling", name)
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids"),
        )
    },
    **{name: ("stop", name) for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop")},
    "stop": ("stop", "strings"),
    "stop_token_ids": ("stop", "token_ids"),
    **{name: ("output", name) for name in ("logprobs", "prompt_logprobs")},
    **{name: ("structure", name) for name in _STRUCTURE},
    "drafts_max": ("drafts", "max_tokens"),
    "golden_tokens": ("drafts", "golden"),
    **{name: ("drafts", name) for name in ("force_golden", "golden_acceptance")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. None means the checkpoint's default, or that it is not asked for.

    Fields as in `airside.v1`: Sampling, Stop (`stop` are its strings), Output, Structure (at most one of its kinds),
    Drafts, and of GenerateRequest `n`, `priority`, `user` and `cache_salt`.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None  # JSON, as a text or as Python values
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None
    gbnf: str | None = None
    drafts_max: int | None = None
    golden_tokens: Sequence[int] | None = None
    force_golden: bool | None = None
    golden_acceptance: float | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None

    def to_request(self) -> pb.GenerateRequest:
        """The same as the public message, without a prompt. Raises as `fill`."""
        return self.fill(pb.GenerateRequest())

    def fill(self, request: Request) -> Request:
        """Sets those fields of a request that were given, and no others; returns it.

        Raises:
            RequestError: a value that is of another type, or outside its type's range; two kinds of structure.
        """
        kinds = [name for name in _STRUCTURE if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise invalid(kinds[1], f"contradicts the rest of {' and '.join(kinds)}: a text has one structure")
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None or value == ():
                continue
            block_name, field_name = _PLACES.get(name, ("", name))
            block: Any = getattr(request, block_name) if block_name else request  # Any: one of several message classes
            try:
                block.MergeFrom(type(block)(**{field_name: _as_proto(name, value)}))
            except (TypeError, ValueError) as error:
                raise invalid(name, f"is {value!r:.60}: {error}") from error
        return request


def _as_proto(name: str, value: Any) -> Any:  # Any: a field's value, before and after
    match name:
        case "stop" if isinstance(value, str):
            return [value]
        case "json_schema" if not isinstance(value, str):
            return json.dumps(value)
        case "choice":
            return pb.Choice(texts=value)
        case "golden_tokens":
            return pb.TokenIds(ids=value)
    return value
