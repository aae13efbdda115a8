"""MiMo (Xiaomi 2025, arXiv 2505.07608): a Qwen2 with a layer behind it that predicts the token after the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from airside.workers import ops
from airside.workers.kv_cache import LayerCache
from airside.workers.layers import RotaryTable
from airside.workers.model_config import ModelConfig
from airside.workers.models.llama import LlamaForCausalLM, LlamaLayer
from airside.workers.parallel import RankGroup
from airside.workers.placed_rows import PlacedRows
from airside.workers.weights.weight_source import MatrixPart, WeightSource


class MiMoForCausalLM(LlamaForCausalLM):
    """A DraftingModel; the draft layer is there when `config.num_draft_layers` says so.

    Of several such layers in a checkpoint the first is taken, again and again to look further ahead.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> None:
        super().__init__(config, weights, group, max_positions)
        self._draft_layer: MtpLayer | None = None
        if config.num_draft_layers > 0:
            at = "model." if weights.has("model.embed_tokens.weight") else ""
            self._draft_layer = MtpLayer(weights, f"{at}mtp_layers.0", config, group)

    def draft(self, hidden: Tensor, next_ids: Tensor, batch: PlacedRows, cache: LayerCache) -> Tensor:
        """What `logits` needs to predict, for each token, the one after its `next_ids`.

        Args:
            hidden: [num_tokens, hidden]: the model's states after its final norm, or what this returned for the token
                before.
            next_ids: [num_tokens] int64: the token that follows each of these.
            batch: where the draft layer's keys and values of these tokens go, in `cache`, which is its own.
        Returns: [num_tokens, hidden].
        """
        assert self._draft_layer is not None, "the draft layer was not loaded"
        return self._draft_layer(hidden, self.embed(next_ids), batch, self._rotary, cache)


class MtpLayer:
    """A decoder layer over a token's state and the embedding of the token after it, projected to one vector."""

    def __init__(self, weights: WeightSource, prefix: str, config: ModelConfig, group: RankGroup) -> None:
        size = config.hidden_size
        self._eps = config.rms_norm_eps
        self._hidden_norm = weights.read(f"{prefix}.hidden_layernorm.weight", (size,))
        self._token_norm = weights.read(f"{prefix}.token_layernorm.weight", (size,))
        self._input = weights.linear([MatrixPart(f"{prefix}.input_proj.weight", (size, 2 * size))])
        self._layer = LlamaLayer(weights, prefix, config, group)
        self._final_norm = weights.read(f"{prefix}.final_layernorm.weight", (size,))

    def __call__(
        self, hidden: Tensor, embeddings: Tensor, batch: PlacedRows, rotary: RotaryTable, cache: LayerCache
    ) -> Tensor:
        """[num_tokens, hidden] twice -> [num_tokens, hidden]."""
        parts = (
            ops.rms_norm(hidden, self._hidden_norm, self._eps),
            ops.rms_norm(embeddings, self._token_norm, self._eps),
        )
        residual = self._input(torch.cat(parts, dim=1))
        x = ops.rms_norm(residual, self._layer.input_norm, self._eps)
        x = self._layer.attention(x, batch, rotary, cache)
        x = self._layer.mlp(ops.add_rms_norm(x, residual, self._layer.post_attention_norm, self._eps))
        return ops.add_rms_norm(x, residual, self._final_norm, self._eps)


MODELS = {"MiMoForCausalLM": MiMoForCausalLM}
