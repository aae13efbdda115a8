"""What transformers' reading of a GGUF tokenizer loses: how the text is cut before the merges."""

from __future__ import annotations

import logging
from pathlib import Path

from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers

log = logging.getLogger(__name__)

_PRE = "tokenizer.ggml.pre"
_AS_CONVERTED = {"default", "gpt-2", "llama-bpe", "llama3"}  # transformers' own choice is that of the original


def restore_pre_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Sets the pre-tokenizer that the file names, in place.

    transformers cuts every byte-level vocabulary as GPT-2 did. SmolLM's cuts each digit off first, so that for instance
    "\n\n1" keeps its two line ends together. A name that is not known here is logged: its texts may be cut otherwise
    than in training, which costs quality and not correctness.
    """
    field = GGUFReader(path).fields.get(_PRE)
    name = None if field is None else field.contents()
    if name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name is not None and name not in _AS_CONVERTED:
        log.warning("gguf_pre_tokenizer_unknown name=%s file=%s", name, path)
