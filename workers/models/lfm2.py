"""LFM2 (Liquid AI 2025, arXiv 2511.23404): short convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from airside.workers.kv_cache import LayerCache
from airside.workers.layers import Attention, Mlp, RotaryTable, final_states, norm_of_sum
from airside.workers.model_config import ModelConfig
from airside.workers.parallel import RankGroup
from airside.workers.short_conv import ShortConv
from airside.workers.state_slots import LayerState, StateRows, find_state_rows, ring_length
from airside.workers.step_batch import StepBatch
from airside.workers.vocabulary import read_vocabulary
from airside.workers.weights.weight_source import WeightSource


class Lfm2Layer:
    """The weights of one decoder layer, which attends or convolves."""

    def __init__(
        self, weights: WeightSource, prefix: str, config: ModelConfig, group: RankGroup, *, attends: bool
    ) -> None:
        self.operator_norm = weights.read(f"{prefix}.operator_norm.weight", (config.hidden_size,))
        self.operator: Attention | ShortConv = (
            Attention(
                weights, f"{prefix}.self_attn", config, group, out="out_proj", norms=("q_layernorm", "k_layernorm")
            )
            if attends
            else ShortConv(weights, f"{prefix}.conv", config, group)
        )
        self.ffn_norm = weights.read(f"{prefix}.ffn_norm.weight", (config.hidden_size,))
        self.mlp = Mlp(weights, f"{prefix}.feed_forward", config, group, names=("w1", "w3", "w2"))


class Lfm2ForCausalLM:
    """A CausalModel whose convolutions keep their state in slots.

    Args:
        max_positions: the longest sequence that will be served.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> None:
        hidden = config.hidden_size
        convolving = () if config.short_conv is None else config.short_conv.layers
        self._history = 0 if config.short_conv is None else config.short_conv.history
        self._channels = hidden // group.size
        self._eps = config.rms_norm_eps
        is_tied = config.tie_word_embeddings
        name = "model.embed_tokens" if is_tied else "lm_head"
        self._embedding, self._head = read_vocabulary(weights, "model.embed_tokens", name, config, group)
        self._layers = [
            Lfm2Layer(weights, f"model.layers.{layer_id}", config, group, attends=layer_id not in convolving)
            for layer_id in range(config.num_layers)
        ]
        self._norm = weights.read("model.embedding_norm.weight", (hidden,))
        self._rotary = RotaryTable(config, max_positions, self._norm.device)
        self._states: list[LayerState] = []
        self._ring = 0

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        raise TypeError(f"a text model was given a picture with the tensors {sorted(pixels)}")

    def allocate_states(self, num_slots: int, num_blocks: int, max_draft_tokens: int) -> None:
        self._states = []
        self._ring = ring_length(self._history, max_draft_tokens)
        weight = self._norm  # of the model's dtype, on its device
        self._states = [
            LayerState(num_slots, num_blocks, self._history, self._ring, self._channels, weight.dtype, weight.device)
            for layer in self._layers
            if isinstance(layer.operator, ShortConv)
        ]

    def forward(self, hidden: Tensor, batch: StepBatch, cache: list[LayerCache]) -> Tensor:
        residual, eps = hidden, self._eps
        caches, states = iter(cache), iter(self._states)
        rows = self._state_rows(batch, block_size=cache[0].k.shape[2])
        x: Tensor | None = None  # what the block before adds to the residual stream
        for layer in self._layers:
            x = norm_of_sum(x, residual, layer.operator_norm, eps)
            if isinstance(layer.operator, ShortConv):
                assert rows is not None
                x = layer.operator(x, rows, next(states))
            else:
                x = layer.operator(x, batch, self._rotary, next(caches))
            x = layer.mlp(norm_of_sum(x, residual, layer.ffn_norm, eps))
        return final_states(x, residual, batch.wanted, self._norm, eps)

    def _state_rows(self, batch: StepBatch, block_size: int) -> StateRows | None:
        """None for a model of attention layers only."""
        return find_state_rows(batch, self._history, self._ring, block_size) if self._states else None

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self._head(hidden)


MODELS = {"Lfm2ForCausalLM": Lfm2ForCausalLM}
