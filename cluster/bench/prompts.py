"""Prompts of an exact length. Speed does not depend on the words, so they are made up."""

from __future__ import annotations

import random

Prompts = list[list[int]]

_SPECIAL_TOKENS = 1000  # most vocabularies have their special tokens among the first, or after all others
_ORDINARY_TOKENS = 39_000


def make_prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> Prompts:
    """`count` different prompts of `num_tokens` ordinary token ids; the same for the same seed."""
    chosen = random.Random(f"{seed} {count} {num_tokens}")
    first = min(_SPECIAL_TOKENS, vocab_size // 4)
    last = min(first + _ORDINARY_TOKENS, max(first + 1, vocab_size * 3 // 4))
    return [chosen.choices(range(first, last), k=num_tokens) for _ in range(count)]
