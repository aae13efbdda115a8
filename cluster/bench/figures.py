"""The figures of an engine that turns prompts into tokens, measured the same way whatever the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from airside.cluster.bench.machine import Limits
from airside.cluster.bench.precision import Precision
from airside.cluster.bench.prompts import Prompts, make_prompts
from airside.workers.model_config import ModelConfig

Generate = Callable[[Prompts, int], float]
"""Computes all prompts together, greedily, exactly so many tokens for each; returns the seconds it took."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine."""

    prompt_tokens: int = 128
    output_tokens: int = 128
    num_requests: tuple[int, ...] = (1, 32)
    """So many at once; 1 stands for one request alone, of which first token and decoding are told apart."""
    prefill_tokens: int = 2048
    """Of one long prompt; 0: none."""
    rounds: int = 5


QUICK = Load(prompt_tokens=32, output_tokens=8, num_requests=(1, 4), prefill_tokens=64, rounds=1)


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that is measured."""

    key: str
    label: str
    unit: str
    is_rate: bool = True
    """More is better; else less is."""


FIRST_TOKEN = Figure("first_token", "one request: time to first token", "ms", is_rate=False)
DECODE = Figure("decode", "one request: decode", "tokens/s")
PREFILL = Figure("prefill", "one long prompt: prefill", "tokens/s")


def together(num_requests: int) -> Figure:
    """Output tokens of so many requests at once."""
    return Figure(f"together_{num_requests}", f"{num_requests} requests at once: output", "tokens/s")


def figures_of(load: Load) -> list[Figure]:
    """All that `measure_round` measures, in its order."""
    alone = [FIRST_TOKEN, DECODE] if 1 in load.num_requests else []
    many = [together(count) for count in load.num_requests if count > 1]
    return [*alone, *([PREFILL] if load.prefill_tokens else []), *many]


def measure_round(generate: Generate, load: Load, vocab_size: int, seed: int) -> Iterator[tuple[Figure, float]]:
    """Every figure once. Prompts are of this round alone, so that no prefix cache has them.

    Decode speed is `(n - 1) / (time of n tokens - time of one)`, for two prompts of one length.
    """
    if 1 in load.num_requests:
        one, other = make_prompts(2, load.prompt_tokens, vocab_size, seed)
        first_s = generate([one], 1)
        yield FIRST_TOKEN, first_s * 1e3
        whole_s = generate([other], load.output_tokens)
        # On a machine so busy that the first token alone took longer, all of the time counts.
        decode_s = whole_s - first_s if whole_s > first_s else whole_s
        yield DECODE, (load.output_tokens - 1) / decode_s
    if load.prefill_tokens:
        seconds = generate(make_prompts(1, load.prefill_tokens, vocab_size, seed), 1)
        yield PREFILL, load.prefill_tokens / seconds
    for count in load.num_requests:
        if count > 1:
            seconds = generate(make_prompts(count, load.prompt_tokens, vocab_size, seed), load.output_tokens)
            yield together(count), count * load.output_tokens / seconds


def limits_of(load: Load, config: ModelConfig, precision: Precision, limits: Limits) -> dict[Figure, float | None]:
    """What each figure would be if weights were read and multiplied as fast as this machine can, and nothing else done.

    Args:
        precision: the engine's; where it leaves a limit unknown, that is None.
    """
    body, head = count_weights(config)

    def prefill_s(num_tokens: int, num_prompts: int = 1) -> float | None:  # only a prompt's last token gets logits
        return precision.least_seconds(limits, body + head, 2 * (num_tokens * body + num_prompts * head))

    def decode_s(num_rows: int) -> float | None:
        return precision.least_seconds(limits, body + head, 2 * num_rows * (body + head))

    first_s, token_s = prefill_s(load.prompt_tokens), decode_s(1)
    found = {FIRST_TOKEN: first_s and first_s * 1e3, DECODE: token_s and 1 / token_s}
    if load.prefill_tokens:
        whole_s = prefill_s(load.prefill_tokens)
        found[PREFILL] = whole_s and load.prefill_tokens / whole_s
    for count in load.num_requests:
        prompts_s, step_s = prefill_s(count * load.prompt_tokens, count), decode_s(count)
        if prompts_s is None or step_s is None:
            found[together(count)] = None
        else:
            found[together(count)] = count * load.output_tokens / (prompts_s + (load.output_tokens - 1) * step_s)
    return found


def count_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights that every token is multiplied with: of all decoder layers, and of the head.

    Norms and what else is small are left out, short convolutions too, of which only the projections count.
    """
    hidden = config.hidden_size
    attention = hidden * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * hidden * config.intermediate_size
    convolutions = config.num_layers - config.num_attention_layers
    body = config.num_layers * mlp + config.num_attention_layers * attention + convolutions * 4 * hidden * hidden
    return body, config.vocab_size * hidden
