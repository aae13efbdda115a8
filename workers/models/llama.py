"""Llama (Touvron et al. 2023, arXiv 2302.13971), the text part of several families."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from airside.workers import ops
from airside.workers.kv_cache import LayerCache
from airside.workers.layers import Attention, Mlp, RotaryTable
from airside.workers.model_config import ModelConfig
from airside.workers.parallel import RankGroup, VocabParallelEmbedding, VocabParallelHead, read_vocab_rows
from airside.workers.step_batch import StepBatch
from airside.workers.weights.weight_source import WeightSource


class LlamaLayer:
    """The weights of one decoder layer."""

    def __init__(self, weights: WeightSource, prefix: str, config: ModelConfig, group: RankGroup) -> None:
        self.input_norm = weights.read(f"{prefix}.input_layernorm.weight", (config.hidden_size,))
        self.attention = Attention(weights, f"{prefix}.self_attn", config, group)
        self.post_attention_norm = weights.read(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,))
        self.mlp = Mlp(weights, f"{prefix}.mlp", config, group)


class LlamaForCausalLM:
    """A CausalModel without images.

    Args:
        prefixes: where the decoder's tensors may be in the checkpoint, likeliest first.
        max_positions: the longest sequence that will be served.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        group: RankGroup,
        max_positions: int,
        prefixes: tuple[str, ...] = ("model.", ""),
    ) -> None:
        at = next((p for p in prefixes if weights.has(f"{p}embed_tokens.weight")), prefixes[0])
        vocab, hidden = config.vocab_size, config.hidden_size
        self._eps = config.rms_norm_eps
        self._embedding = VocabParallelEmbedding(weights, f"{at}embed_tokens", vocab, hidden, group)
        self._layers = [
            LlamaLayer(weights, f"{at}layers.{layer_id}", config, group) for layer_id in range(config.num_layers)
        ]
        self._norm = weights.read(f"{at}norm.weight", (hidden,))
        head = self._embedding.weight
        if not config.tie_word_embeddings:
            head = read_vocab_rows(weights, "lm_head", vocab, hidden, group)
        self._head = VocabParallelHead(head, vocab, group)
        self._rotary = RotaryTable(config, max_positions, head.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        raise TypeError(f"a text model was given a picture with the tensors {sorted(pixels)}")

    def forward(self, hidden: Tensor, batch: StepBatch, cache: list[LayerCache]) -> Tensor:
        # `hidden` is the residual stream; `x` what a block reads from it or adds to it next. A norm and the
        # addition before it are one operator, so the norm that a layer starts with is called by the one before.
        residual = hidden
        x = ops.rms_norm(residual, self._layers[0].input_norm, self._eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]]
        for layer, layer_cache, next_norm in zip(self._layers, cache, [*next_norms, None], strict=True):
            x = layer.attention(x, batch, self._rotary, layer_cache)
            x = ops.add_rms_norm(x, residual, layer.post_attention_norm, self._eps)
            x = layer.mlp(x)
            if next_norm is not None:
                x = ops.add_rms_norm(x, residual, next_norm, self._eps)
        wanted = batch.sampled_tokens
        if wanted.numel() == 0:
            return hidden[:0]
        return ops.add_rms_norm(_rows(x, wanted), _rows(residual, wanted), self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self._head(hidden)


def _rows(x: Tensor, wanted: Tensor) -> Tensor:
    return torch.index_select(x, 0, wanted)
