"""A smaller vocabulary for n-grams: tokens whose texts differ only in case, accents or white space are one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from airside.workers.model_config import CheckpointError

DEAD = -1
"""The folded id of what no n-gram reaches over: special tokens, image tokens, ids without a text."""

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a part of one


def fold_tokens(tokenizer_file: Path, vocab_size: int, dead: Iterable[int] = ()) -> NDArray[np.int64]:
    """[vocab_size]: the folded id of each token, numbered by first appearance.

    Args:
        tokenizer_file: a checkpoint's tokenizer.json.
        dead: ids of image tokens, which need not be special ones.
    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{tokenizer_file} cannot be read, and n-gram embeddings need it: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    excluded = {token_id for token_id, token in added.items() if token.special} | set(dead)
    names = {token_id: name for name, token_id in tokenizer.get_vocab().items()}
    living = [token_id for token_id in sorted(names) if token_id < vocab_size and token_id not in excluded]
    texts = tokenizer.decode_batch([[token_id] for token_id in living], skip_special_tokens=False)

    folded = np.full(vocab_size, DEAD, np.int64)
    numbers: dict[str, int] = {}
    for token_id, text in zip(living, texts, strict=True):
        # Parts of characters all look the same once decoded, so they go by the vocabulary's name for them.
        key = names[token_id] if _NO_CHARACTER in text else fold_text(text)
        folded[token_id] = numbers.setdefault(key, len(numbers))
    return folded


def fold_text(text: str) -> str:
    """Compatibility forms, case and accents made equal, runs of white space made one space."""
    caseless = unicodedata.normalize("NFKC", text).casefold()
    bare = "".join(char for char in unicodedata.normalize("NFKD", caseless) if not unicodedata.combining(char))
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", bare))
