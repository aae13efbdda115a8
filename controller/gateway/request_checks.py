"""Everything that is checked before a request reaches the controller.

Each check returns what it checked in the form that is used from here on, or raises a `RequestError` which names the
field, the limit, the actual value and the remedy. Order: cheap ones first, tokenizing last.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from airside.controller.gateway.errors import invalid
from airside.controller.gateway.generation_defaults import GenerationDefaults
from airside.proto import airside_pb2 as pb

LABEL_BYTES_MAX = 256
STOP_TOKENS_MAX = 64
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256
TEMPERATURE_MAX = 100.0
REPETITION_PENALTY_MAX = 10.0
PENALTY_MAX = 2.0
BIAS_MAX = 100.0
BIASES_MAX = 1024
ALLOWED_TOKENS_MAX = 4096


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What pictures a request may bring. `mark` is the token that stands for one; None for a text model."""

    mark_id: int | None
    mark: str
    images_max: int
    image_bytes_max: int
    allow_urls: bool = False
    picture_ids: frozenset[int] = frozenset()  # tokens that stand for pictures, the mark among them
    takes_pixel_ranges: bool = False


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Every sampling value decided. Fields as in `messages.AddRequest`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: list[int]  # empty: all


@dataclass(frozen=True, slots=True)
class StopValues:
    """When a sequence ends. `max_tokens` None: when the context is full."""

    max_tokens: int | None
    min_tokens: int
    token_ids: list[int]
    strings: list[str]
    include_stop: bool


@dataclass(frozen=True, slots=True)
class LogprobValues:
    """How many alternatives come with each token's log-probability; -1: none at all. Fields as in AddRequest."""

    logprobs: int
    prompt_logprobs: int


@dataclass(frozen=True, slots=True)
class DraftValues:
    """What is guessed and verified. Fields as in `messages.AddRequest`, but for the tokens, which are a list here."""

    drafts_max: int | None
    golden_tokens: list[int]
    golden_mode: str
    golden_acceptance: float


def check_request_id(request_id: str) -> str:
    """The id as given, or a fresh one."""
    return check_label("request_id", request_id) or uuid.uuid4().hex


def check_label(field: str, label: str) -> str:
    """A name that the client chose, as given: printable and short."""
    size = len(label.encode())
    if size > LABEL_BYTES_MAX:
        raise invalid(field, f"has {size} bytes, at most {LABEL_BYTES_MAX} are allowed; use a shorter one")
    if not label.isprintable():
        bad = next(char for char in label if not char.isprintable())
        raise invalid(field, f"holds the unprintable character U+{ord(bad):04X}; use printable ones only")
    return label


def check_num_sequences(message: pb.GenerateRequest | pb.ChatRequest, sequences_max: int) -> int:
    """How many continuations are asked for."""
    n = message.n if message.HasField("n") else 1
    if not 1 <= n <= sequences_max:
        raise invalid("n", f"is {n}, but must be in [1, {sequences_max}]; send several requests for more")
    return n


def check_sampling(sampling: pb.Sampling, defaults: GenerationDefaults, vocab_size: int) -> SamplingValues:
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
    return SamplingValues(
        temperature=temperature,
        top_k=top_k if top_k < vocab_size else 0,  # all of them
        top_p=top_p,
        min_p=min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        repetition_penalty=_check_repetition_penalty(sampling),
        presence_penalty=_check_penalty("sampling.presence_penalty", sampling.presence_penalty),
        frequency_penalty=_check_penalty("sampling.frequency_penalty", sampling.frequency_penalty),
        logit_bias=_check_logit_bias(sampling.logit_bias, vocab_size),
        allowed_token_ids=_check_allowed(sampling.allowed_token_ids, vocab_size),
    )


def _check_repetition_penalty(sampling: pb.Sampling) -> float:
    penalty = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0.0 < penalty <= REPETITION_PENALTY_MAX:
        raise invalid(
            "sampling.repetition_penalty",
            f"is {penalty:g}, but must be in (0, {REPETITION_PENALTY_MAX:g}]; 1 is no penalty",
        )
    return penalty


def _check_penalty(field: str, penalty: float) -> float:
    if not -PENALTY_MAX <= penalty <= PENALTY_MAX:
        raise invalid(field, f"is {penalty:g}, but must be in [-{PENALTY_MAX:g}, {PENALTY_MAX:g}]; 0 is no penalty")
    return penalty


def _check_logit_bias(logit_bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    field = "sampling.logit_bias"
    if len(logit_bias) > BIASES_MAX:
        raise invalid(field, f"has {len(logit_bias)} entries, at most {BIASES_MAX} are allowed; leave some out")
    for token_id, bias in logit_bias.items():
        _check_token_id(f"{field}[{token_id}]", token_id, vocab_size)
        if not -BIAS_MAX <= bias <= BIAS_MAX:
            raise invalid(
                f"{field}[{token_id}]",
                f"is {bias:g}, but must be in [-{BIAS_MAX:g}, {BIAS_MAX:g}]; allowed_token_ids can exclude tokens",
            )
    return dict(logit_bias)


def _check_allowed(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    field = "sampling.allowed_token_ids"
    if len(token_ids) > ALLOWED_TOKENS_MAX:
        raise invalid(
            field,
            f"has {len(token_ids)} ids, at most {ALLOWED_TOKENS_MAX} are allowed; a structure can restrict more freely",
        )
    check_in_vocabulary(field, token_ids, vocab_size)
    return sorted(set(token_ids))


def check_stop(
    stop: pb.Stop, end_ids: Sequence[int], vocab_size: int, max_model_len: int, is_structured: bool = False
) -> StopValues:
    """When to end: the request's own tokens, and the model's unless they are to be ignored.

    A structured text ends by them in any case: once its grammar is through, nothing else may come.
    """
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        raise invalid("stop.max_tokens", f"is {max_tokens}, but must be at least 1; leave it out for no limit")
    if stop.min_tokens < 0:
        raise invalid("stop.min_tokens", f"is {stop.min_tokens}, but must be at least 0; leave it out for none")
    if stop.min_tokens >= max_model_len:
        raise invalid(
            "stop.min_tokens", f"is {stop.min_tokens}, but the context holds {max_model_len} tokens in all; lower it"
        )
    if max_tokens is not None and stop.min_tokens > max_tokens:
        raise invalid(
            "stop.min_tokens", f"is {stop.min_tokens}, more than the {max_tokens} of stop.max_tokens; lower it"
        )
    if len(stop.token_ids) > STOP_TOKENS_MAX:
        raise invalid(
            "stop.token_ids", f"has {len(stop.token_ids)} ids, at most {STOP_TOKENS_MAX} are allowed; leave some out"
        )
    check_in_vocabulary("stop.token_ids", stop.token_ids, vocab_size)
    keeps_ends = is_structured or not stop.ignore_eos
    chosen = {*stop.token_ids, *end_ids} if keeps_ends else {*stop.token_ids}
    strings = _check_stop_strings(stop.strings)
    return StopValues(max_tokens, stop.min_tokens, sorted(chosen), strings, stop.include_stop)


def _check_stop_strings(strings: Sequence[str]) -> list[str]:
    field = "stop.strings"
    if len(strings) > STOP_STRINGS_MAX:
        raise invalid(field, f"has {len(strings)} texts, at most {STOP_STRINGS_MAX} are allowed; leave some out")
    for i, text in enumerate(strings):
        if not text:
            raise invalid(f"{field}[{i}]", "is empty; send a text of at least one character, or leave it out")
        if len(text) > STOP_STRING_CHARS_MAX:
            raise invalid(
                f"{field}[{i}]",
                f"has {len(text)} characters, at most {STOP_STRING_CHARS_MAX} are allowed; a beginning of it will do",
            )
    return list(strings)


def check_logprobs(output: pb.Output, logprobs_max: int) -> LogprobValues:
    """Which log-probabilities are asked for."""
    for name in ("logprobs", "prompt_logprobs"):
        wanted: int = getattr(output, name)
        if not 0 <= wanted <= logprobs_max:
            raise invalid(
                f"output.{name}",
                f"is {wanted}, but must be in [0, {logprobs_max}]; it is how many alternatives come with each token",
            )
    return LogprobValues(
        output.logprobs if output.HasField("logprobs") else -1,
        output.prompt_logprobs if output.HasField("prompt_logprobs") else -1,
    )


def check_drafts(
    drafts: pb.Drafts, vocab_size: int, picture_ids: Set[int], max_model_len: int, is_structured: bool
) -> DraftValues:
    """Draft tokens and golden tokens."""
    if drafts.max_tokens < 0:
        raise invalid("drafts.max_tokens", f"is {drafts.max_tokens}, but must be at least 0; 0 is no drafts")
    acceptance = drafts.golden_acceptance if drafts.HasField("golden_acceptance") else 1.0
    if not 0.0 <= acceptance <= 1.0:
        raise invalid("drafts.golden_acceptance", f"is {acceptance:g}, but must be in [0, 1]; 1 spoils no draft")
    golden = list(drafts.golden.ids)
    if drafts.HasField("golden"):
        check_in_vocabulary("drafts.golden.ids", golden, vocab_size)
        check_length("drafts.golden.ids", len(golden), max_model_len)
        for index, token_id in enumerate(golden):
            if token_id in picture_ids:
                at = f"drafts.golden.ids[{index}]"
                raise invalid(at, f"is {token_id}, which marks images and is never chosen; leave it out")
    elif drafts.force_golden or drafts.HasField("golden_acceptance"):
        field = "drafts.force_golden" if drafts.force_golden else "drafts.golden_acceptance"
        raise invalid(field, "needs golden tokens; send drafts.golden too, or leave this out")
    if drafts.force_golden and is_structured:
        raise invalid("drafts.force_golden", "contradicts the structure, which may not allow them; leave one out")
    mode = "" if not golden else "force" if drafts.force_golden else "draft"
    return DraftValues(drafts.max_tokens if drafts.HasField("max_tokens") else None, golden, mode, acceptance)


def check_some_token_is_left(sampling: SamplingValues, stop: StopValues, picture_ids: Set[int]) -> None:
    """Allowed tokens are none, or some of them can be chosen from the first token on."""
    field = "sampling.allowed_token_ids"
    if not sampling.allowed_token_ids:
        return
    usable = {*sampling.allowed_token_ids} - picture_ids
    if not usable:
        never = sampling.allowed_token_ids[0]
        raise invalid(field, f"allows only token {never}, which marks images and is never chosen; allow others")
    if stop.min_tokens > 0 and usable <= {*stop.token_ids}:
        raise invalid(field, "allows only tokens that end the text, which stop.min_tokens forbids; allow others")


def check_golden_fits(num_golden: int, num_prompt: int, max_model_len: int) -> None:
    """Tokens that are to be the output have room behind the prompt."""
    if num_prompt + num_golden > max_model_len:
        raise invalid(
            "drafts.golden.ids",
            f"has {num_golden} tokens to force after a prompt of {num_prompt}, but the context holds {max_model_len}; "
            "shorten one of them",
        )


def _check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise invalid(field, f"is {token_id}, but this model's token ids are in [0, {vocab_size})")


def check_in_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Every id is in [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        for index, token_id in enumerate(token_ids):
            _check_token_id(f"{field}[{index}]", token_id, vocab_size)


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
    if brought := limits.picture_ids - {limits.mark_id}:
        for index, token_id in enumerate(token_ids):
            if token_id in brought:
                raise invalid(
                    field,
                    f"has token {token_id} (its number {index}), which only images bring; "
                    f"write {limits.mark} (token {limits.mark_id}) in the place of an image",
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
