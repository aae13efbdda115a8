"""Values that no request may have: of sampling, stops, log-probabilities, drafts; all but the prompt."""

from __future__ import annotations

from typing import Any

from tests.gateway.tiny_checkpoint import IMAGE_ID, byte_level_tokenizer

VOCAB_SIZE = byte_level_tokenizer().get_vocab_size(with_added_tokens=True)


def with_sampling(**values: Any) -> dict[str, Any]:
    return {"prompt": "a", "sampling": values}


def with_stop(**values: Any) -> dict[str, Any]:
    return {"prompt": "a", "stop": values}


def with_output(**values: Any) -> dict[str, Any]:
    return {"prompt": "a", "output": values}


def with_drafts(**values: Any) -> dict[str, Any]:
    return {"prompt": "a", "drafts": values}


BAD_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    # request, field at fault, what the message must say
    (with_sampling(temperature=-0.1), "sampling.temperature", "is -0.1, but must be in [0, 100]"),
    (with_sampling(temperature=100.5), "sampling.temperature", "is 100.5, but must be in [0, 100]"),
    (with_sampling(temperature="NaN"), "sampling.temperature", "is nan, but must be in [0, 100]"),
    (with_sampling(temperature="Infinity"), "sampling.temperature", "is inf, but must be in [0, 100]"),
    (with_sampling(top_k=-1), "sampling.top_k", "is -1, but must be at least 0"),
    (with_sampling(top_p=0), "sampling.top_p", "is 0, but must be in (0, 1]"),
    (with_sampling(top_p=1.5), "sampling.top_p", "is 1.5, but must be in (0, 1]"),
    (with_sampling(top_p="NaN"), "sampling.top_p", "is nan, but must be in (0, 1]"),
    (with_sampling(min_p=-0.5), "sampling.min_p", "is -0.5, but must be in [0, 1]"),
    (with_sampling(min_p="NaN"), "sampling.min_p", "is nan, but must be in [0, 1]"),
    (with_stop(max_tokens=0), "stop.max_tokens", "is 0, but must be at least 1"),
    (with_stop(max_tokens=-5), "stop.max_tokens", "is -5, but must be at least 1"),
    (with_stop(min_tokens=-1), "stop.min_tokens", "is -1, but must be at least 0; leave it out"),
    (with_stop(min_tokens=100), "stop.min_tokens", "is 100, but the context holds 100 tokens in all; lower it"),
    (with_stop(min_tokens=3, max_tokens=2), "stop.min_tokens", "is 3, more than the 2 of stop.max_tokens; lower it"),
    (with_stop(token_ids=[0, VOCAB_SIZE]), "stop.token_ids[1]", f"is {VOCAB_SIZE}, but"),
    (with_stop(token_ids=[1] * 65), "stop.token_ids", "has 65 ids, at most 64 are allowed; leave some out"),
    (with_sampling(top_k=-5), "sampling.top_k", "is -5, but must be at least 0"),
    (with_sampling(top_p=-1), "sampling.top_p", "is -1, but must be in (0, 1]"),
    (with_sampling(top_p=1.0001), "sampling.top_p", "is 1.0001, but must be in (0, 1]"),
    (with_sampling(min_p=2), "sampling.min_p", "is 2, but must be in [0, 1]"),
    (
        with_sampling(repetition_penalty=0),
        "sampling.repetition_penalty",
        "is 0, but must be in (0, 10]; 1 is no penalty",
    ),
    (with_sampling(repetition_penalty=-1), "sampling.repetition_penalty", "is -1, but"),
    (with_sampling(repetition_penalty=1e9), "sampling.repetition_penalty", "is 1e+09, but"),
    (with_sampling(repetition_penalty="NaN"), "sampling.repetition_penalty", "is nan, but"),
    (
        with_sampling(presence_penalty=2.5),
        "sampling.presence_penalty",
        "is 2.5, but must be in [-2, 2]; 0 is no penalty",
    ),
    (with_sampling(presence_penalty="NaN"), "sampling.presence_penalty", "is nan, but"),
    (with_sampling(frequency_penalty=-2.5), "sampling.frequency_penalty", "is -2.5, but must be in [-2, 2]"),
    (with_sampling(frequency_penalty="-Infinity"), "sampling.frequency_penalty", "is -inf, but"),
    (
        with_sampling(logit_bias={-1: 1}),
        "sampling.logit_bias[-1]",
        f"is -1, but this model's token ids are in [0, {VOCAB_SIZE})",
    ),
    (
        with_sampling(logit_bias={VOCAB_SIZE: 1}),
        f"sampling.logit_bias[{VOCAB_SIZE}]",
        "but this model's token ids are in",
    ),
    (with_sampling(logit_bias={2**31 - 1: 1}), "sampling.logit_bias[2147483647]", "is 2147483647, but"),
    (with_sampling(logit_bias={7: 100.5}), "sampling.logit_bias[7]", "is 100.5, but must be in [-100, 100]"),
    (with_sampling(logit_bias={7: "NaN"}), "sampling.logit_bias[7]", "is nan, but must be in [-100, 100]"),
    (with_sampling(logit_bias={7: "-Infinity"}), "sampling.logit_bias[7]", "is -inf, but .* allowed_token_ids"),
    (with_sampling(logit_bias=dict.fromkeys(range(1025), 1)), "sampling.logit_bias", "has 1025 entries, at most 1024"),
    (with_sampling(allowed_token_ids=[5, VOCAB_SIZE]), "sampling.allowed_token_ids[1]", f"is {VOCAB_SIZE}, but"),
    (with_sampling(allowed_token_ids=[-1]), "sampling.allowed_token_ids[0]", "is -1, but"),
    (
        with_sampling(allowed_token_ids=[IMAGE_ID]) | {"stop": {"ignore_eos": True}},
        "sampling.allowed_token_ids",
        f"allows only token {IMAGE_ID}, which marks images",
    ),
    (
        with_sampling(allowed_token_ids=[7]) | {"stop": {"token_ids": [7], "min_tokens": 3}},
        "sampling.allowed_token_ids",
        "allows only tokens that end the text, which stop.min_tokens forbids",
    ),
    (with_sampling(allowed_token_ids=[1] * 4097), "sampling.allowed_token_ids", "has 4097 ids, at most 4096"),
    (with_stop(token_ids=[-1]), "stop.token_ids[0]", "is -1, but"),
    (with_stop(token_ids=[2**31 - 1]), "stop.token_ids[0]", "is 2147483647, but"),
    (with_stop(strings=["x"] * 100_000), "stop.strings", "has 100000 texts, at most 16 are allowed"),
    (with_stop(strings=["a", ""]), "stop.strings[1]", "is empty; send a text of at least one character"),
    (with_stop(strings=["東" * 257]), "stop.strings[0]", "has 257 characters, at most 256 are allowed"),
    (with_output(logprobs=10**9), "output.logprobs", "is 1000000000, but must be in [0, 20]"),
    (with_output(logprobs=-2), "output.logprobs", "is -2, but must be in [0, 20]"),
    (with_output(prompt_logprobs=-1), "output.prompt_logprobs", "is -1, but must be in [0, 20]"),
    (with_output(prompt_logprobs=21), "output.prompt_logprobs", "is 21, but must be in [0, 20]"),
    ({"prompt": "a", "n": 5_000_000}, "n", "is 5000000, but must be in [1, 16]; send several requests"),
    ({"prompt": "a", "n": 0}, "n", "is 0, but must be in [1, 16]"),
    ({"prompt": "a", "n": -1}, "n", "is -1, but must be in [1, 16]"),
    ({"prompt": "a", "user": "x" * 257}, "user", "has 257 bytes, at most 256 are allowed"),
    ({"prompt": "a", "user": "a\u0000b"}, "user", "holds the unprintable character U+0000"),
    ({"prompt": "a", "cache_salt": "東" * 86}, "cache_salt", "has 258 bytes, at most 256 are allowed"),
    ({"prompt": "a", "cache_salt": "a\nb"}, "cache_salt", "holds the unprintable character U+000A"),
    (with_drafts(max_tokens=-1), "drafts.max_tokens", "is -1, but must be at least 0; 0 is no drafts"),
    (with_drafts(golden={}), "drafts.golden.ids", "is empty"),
    (with_drafts(golden={"ids": [5, VOCAB_SIZE]}), "drafts.golden.ids[1]", f"is {VOCAB_SIZE}, but"),
    (with_drafts(golden={"ids": [5, IMAGE_ID]}), "drafts.golden.ids[1]", f"is {IMAGE_ID}, which marks images"),
    (with_drafts(golden={"ids": [5] * 100}), "drafts.golden.ids", "has 100 tokens, but the context holds 100"),
    (
        with_drafts(golden={"ids": [5] * 99}, force_golden=True) | {"token_ids": {"ids": [7, 7]}, "prompt": None},
        "drafts.golden.ids",
        "has 99 tokens to force after a prompt of 2, but the context holds 100",
    ),
    (with_drafts(force_golden=True), "drafts.force_golden", "needs golden tokens; send drafts.golden too"),
    (with_drafts(golden_acceptance=0.5), "drafts.golden_acceptance", "needs golden tokens"),
    (
        with_drafts(golden={"ids": [5]}, golden_acceptance=1.5),
        "drafts.golden_acceptance",
        "is 1.5, but must be in [0, 1]",
    ),
    (with_drafts(golden={"ids": [5]}, golden_acceptance="NaN"), "drafts.golden_acceptance", "is nan, but"),
    (
        with_drafts(golden={"ids": [5]}, force_golden=True) | {"structure": {"json_object": True}},
        "drafts.force_golden",
        "contradicts the structure",
    ),
    ({"prompt": "a", "structure": {"json_object": False}}, "structure.json_object", "is false"),
    ({"prompt": "a", "structure": {"regex": "[a"}}, "structure.regex", ""),
]
