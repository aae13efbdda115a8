"""Llama (Touvron et al. 2023, arXiv 2302.13971), the text part of several families."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from airside.workers.engram import Engrams
from airside.workers.kv_cache import LayerCache
from airside.workers.layers import Attention, Mlp, RotaryTable, final_states, norm_of_sum
from airside.workers.model_config import ModelConfig
from airside.workers.parallel import RankGroup
from airside.workers.step_batch import StepBatch
from airside.workers.vocabulary import read_vocabulary
from airside.workers.weights.release_names import find_name
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
        heads: what the untied head may be called, likeliest first.
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
        heads: tuple[str, ...] = ("lm_head",),
    ) -> None:
        at = find_name(weights, prefixes, "embed_tokens.weight")
        hidden = config.hidden_size
        self._eps = config.rms_norm_eps
        is_tied = config.tie_word_embeddings
        name = f"{at}embed_tokens" if is_tied else find_name(weights, heads, ".weight")
        self._embedding, self._head = read_vocabulary(weights, f"{at}embed_tokens", name, config, group)
        self._layers = [
            LlamaLayer(weights, f"{at}layers.{layer_id}", config, group) for layer_id in range(config.num_layers)
        ]
        self._engrams = Engrams(weights, f"{at}layers", config, group) if config.engram is not None else None
        self._norm = weights.read(f"{at}norm.weight", (hidden,))
        self._rotary = RotaryTable(config, max_positions, self._norm.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        raise TypeError(f"a text model was given a picture with the tensors {sorted(pixels)}")

    def allocate_states(self, num_slots: int, num_blocks: int, max_draft_tokens: int) -> None:
        pass  # it has keys and values only

    def forward(self, hidden: Tensor, batch: StepBatch, cache: list[LayerCache]) -> Tensor:
        residual, eps = hidden, self._eps
        x: Tensor | None = None  # what the block before adds to the residual stream
        memories = {} if self._engrams is None else self._engrams.memories(batch)
        for layer_id, (layer, layer_cache) in enumerate(zip(self._layers, cache, strict=True)):
            if (memory := memories.get(layer_id)) is not None:
                x = memory.recall(norm_of_sum(x, residual, memory.norm, eps))
            x = norm_of_sum(x, residual, layer.input_norm, eps)
            x = layer.attention(x, batch, self._rotary, layer_cache)
            x = layer.mlp(norm_of_sum(x, residual, layer.post_attention_norm, eps))
        return final_states(x, residual, batch.wanted, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self._head(hidden)


MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,  # a Llama with other biases
    "Qwen3ForCausalLM": LlamaForCausalLM,  # and one with norms in its attention
}
