"""The text side of the demo model: the tensors and the tokenizer inside a Llama GGUF file, in Hugging Face's terms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from airside.workers.weights.gguf_file import GgufFile

# Idefics3 needs four special tokens. Adding rows to the embedding would change the text model, so four that
# SmolLM2's vocabulary has but its chats never use get these names; their embeddings were part of the training.
RENAMED_TOKENS = {
    "<repo_name>": "<image>",
    "<reponame>": "<fake_token_around_image>",
    "<filename>": "<global-img>",
    "<gh_stars>": "<end_of_utterance>",
}

_SPECIAL_TOKEN_TYPE = 3  # GGUF's tokenizer.ggml.token_type of control tokens


class LanguageModel:
    """An open GGUF file of Llama architecture.

    Args:
        path: the file; it is memory-mapped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = GGUFReader(path)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as bfloat16, under its name in `LlamaModel`. The output head is tied to `embed_tokens`."""
        for name, values in GgufFile(self._path, torch.bfloat16, torch.device("cpu")).tensors():
            yield name.removeprefix("model."), values

    def tokenizer(self) -> Tokenizer:
        """SmolLM2's byte-level BPE, each digit a token of its own, with `RENAMED_TOKENS` renamed."""
        tokens = [RENAMED_TOKENS.get(token, token) for token in self._field("tokenizer.ggml.tokens")]
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        # Digits come first: they keep "\n\n1" from being cut as "\n", "\n", "1", which a byte-level split alone does.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._field("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        return tokenizer

    def _field(self, name: str) -> Any:  # Any: GGUF metadata, of whatever type the key has
        return self._reader.fields[name].contents()
