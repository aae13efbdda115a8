"""The text side of the demo model: the tensors and the tokenizer inside a Llama GGUF file, in Hugging Face's terms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Idefics3 needs four special tokens. Adding rows to the embedding would change the text model, so four that
# SmolLM2's vocabulary has but its chats never use get these names; their embeddings were part of the training.
RENAMED_TOKENS = {
    "<repo_name>": "<image>",
    "<reponame>": "<fake_token_around_image>",
    "<filename>": "<global-img>",
    "<gh_stars>": "<end_of_utterance>",
}

_SPECIAL_TOKEN_TYPE = 3  # GGUF's tokenizer.ggml.token_type of control tokens

_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class LanguageModel:
    """An open GGUF file of Llama architecture.

    Args:
        path: the file; it is memory-mapped.
    """

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._heads = {
            "attn_q": int(self._field("llama.attention.head_count")),
            "attn_k": int(self._field("llama.attention.head_count_kv")),
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as bfloat16, under its name in `LlamaModel`. The output head is tied to `embed_tokens`."""
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in self._heads:
                values = _half_split(values, self._heads[part])
            yield hugging_face_name(tensor.name), torch.from_numpy(np.array(values)).to(torch.bfloat16)

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


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`. Raises KeyError for tensors Llama does not have."""
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"layers.{layer}.{_LAYER_NAMES[part]}.weight"
        case [part, "weight"]:
            return f"{_TOP_NAMES[part]}.weight"
        case _:
            raise KeyError(gguf_name)


def _half_split(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Undoes GGUF's order of the rotary dimensions.

    GGUF stores the rows of a head as pairs (0, half), (1, half + 1), ...; Hugging Face keeps the two halves apart.

    Args:
        weight: [num_heads * head_dim, hidden].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])  # [heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)
