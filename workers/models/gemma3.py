"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786): a decoder, alone or behind a vision tower.

Most layers see a window of the last positions, and turn their heads by frequencies of their own. Nevertheless all
layers keep all tokens in the cache, in the blocks that the engine gives a sequence: a window saves time, not memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers import ops
from airside.workers.kv_cache import LayerCache
from airside.workers.layers import Attention, Mlp, RotaryTable, final_states, norm_of_sum
from airside.workers.linear import make_linear
from airside.workers.model_config import ModelConfig
from airside.workers.model_configs.gemma3 import Gemma3VisionConfig
from airside.workers.models.vision_layers import LayerNorm
from airside.workers.models.vision_transformer import VisionTransformer
from airside.workers.parallel import RankGroup
from airside.workers.step_batch import StepBatch
from airside.workers.vocabulary import read_vocabulary
from airside.workers.weights.release_names import DECODERS, HEADS, TOWERS, find_name
from airside.workers.weights.weight_source import WeightSource


class Gemma3Layer:
    """The weights of one decoder layer, with norms before and after both of its blocks."""

    def __init__(
        self, weights: WeightSource, prefix: str, config: ModelConfig, group: RankGroup, *, window: int
    ) -> None:
        def norm(name: str) -> Tensor:
            return weights.read(f"{prefix}.{name}_layernorm.weight", (config.hidden_size,))

        self.is_sliding = window > 0
        self.input_norm = norm("input")
        self.attention = Attention(weights, f"{prefix}.self_attn", config, group, window=window)
        self.post_attention_norm = norm("post_attention")
        self.pre_mlp_norm = norm("pre_feedforward")
        self.mlp = Mlp(weights, f"{prefix}.mlp", config, group, act=ops.gelu_tanh_and_mul)
        self.post_mlp_norm = norm("post_feedforward")


class Gemma3ForCausalLM:
    """A CausalModel without images.

    Args:
        prefixes, heads: as of LlamaForCausalLM.
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
        hidden, sliding = config.hidden_size, config.sliding
        self._eps = config.rms_norm_eps
        is_tied = config.tie_word_embeddings
        name = f"{at}embed_tokens" if is_tied else find_name(weights, heads, ".weight")
        self._embedding, self._head = read_vocabulary(weights, f"{at}embed_tokens", name, config, group)
        self._layers = [
            Gemma3Layer(
                weights,
                f"{at}layers.{layer_id}",
                config,
                group,
                window=sliding.window if sliding is not None and layer_id in sliding.layers else 0,
            )
            for layer_id in range(config.num_layers)
        ]
        self._norm = weights.read(f"{at}norm.weight", (hidden,))
        # Rounded to the weights' dtype, as the embeddings were trained with.
        self._embedding_scale = torch.tensor(hidden**0.5, dtype=self._norm.dtype, device=self._norm.device)
        self._rotary = RotaryTable(config, max_positions, self._norm.device)
        local = config if sliding is None else dataclasses.replace(config, rope=sliding.rope)
        self._local_rotary = RotaryTable(local, max_positions, self._norm.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids) * self._embedding_scale

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        raise TypeError(f"a text model was given a picture with the tensors {sorted(pixels)}")

    def allocate_states(self, num_slots: int, num_blocks: int, max_draft_tokens: int) -> None:
        pass  # it has keys and values only

    def forward(self, hidden: Tensor, batch: StepBatch, cache: list[LayerCache]) -> Tensor:
        residual, eps = hidden, self._eps
        x: Tensor | None = None  # what the block before adds to the residual stream
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            x = norm_of_sum(x, residual, layer.input_norm, eps, zero_centred=True)
            rotary = self._local_rotary if layer.is_sliding else self._rotary
            x = layer.attention(x, batch, rotary, layer_cache)
            x = ops.rms_norm(x, layer.post_attention_norm, eps, zero_centred=True)
            x = layer.mlp(norm_of_sum(x, residual, layer.pre_mlp_norm, eps, zero_centred=True))
            x = ops.rms_norm(x, layer.post_mlp_norm, eps, zero_centred=True)
        return final_states(x, residual, batch.wanted, self._norm, eps, zero_centred=True)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self._head(hidden)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """A CausalModel whose pictures become token embeddings. Every rank holds the whole tower.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape, or an activation is not supported.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> None:
        super().__init__(config, weights, group, max_positions, DECODERS, HEADS)
        assert isinstance(config.vision, Gemma3VisionConfig)
        vision = config.vision
        tower = find_name(weights, TOWERS, "embeddings.position_embedding.weight")
        self._num_layers = vision.num_layers
        self._tower = VisionTransformer(weights, tower, vision, has_class_token=False)
        self._tower_norm = LayerNorm(weights, f"{tower}post_layernorm", vision)
        self._projector = Projector(weights, config.hidden_size, vision)

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """One picture -> [mm_tokens_per_image, hidden].

        Args:
            pixels: `pixel_values` [1, channels, image_size, image_size].
        """
        [states] = self._tower.states(pixels["pixel_values"], [self._num_layers])
        return self._projector(self._tower_norm(states))


class Projector:
    """Pools the patches of a picture, and takes them to the decoder's hidden size."""

    def __init__(self, weights: WeightSource, hidden: int, vision: Gemma3VisionConfig) -> None:
        at = find_name(weights, ("", "model."), "multi_modal_projector.mm_soft_emb_norm.weight")
        self._vision = vision
        self._norm = weights.read(f"{at}multi_modal_projector.mm_soft_emb_norm.weight", (vision.hidden_size,))
        name = f"{at}multi_modal_projector.mm_input_projection_weight"
        self._projection = make_linear(weights.read(name, (vision.hidden_size, hidden)).T.contiguous())

    def __call__(self, states: Tensor) -> Tensor:
        """[num_pictures, num_patches, tower_hidden] -> [num_pictures * mm_tokens_per_image, hidden]."""
        side, size = self._vision.patches_per_side, self._vision.hidden_size
        patches = states.transpose(1, 2).reshape(-1, size, side, side)
        pooled = functional.avg_pool2d(patches, self._vision.pool_size).flatten(2).transpose(1, 2)
        rows = pooled.reshape(-1, size).contiguous()
        return self._projection(ops.rms_norm(rows, self._norm, self._vision.layer_norm_eps, zero_centred=True))


MODELS = {
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
}
