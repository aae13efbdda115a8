"""Which class builds which architecture."""

from __future__ import annotations

from airside.workers.model_config import ModelConfig
from airside.workers.models.causal_model import CausalModel
from airside.workers.models.idefics3 import Idefics3ForConditionalGeneration
from airside.workers.models.lfm2 import Lfm2ForCausalLM
from airside.workers.models.llama import LlamaForCausalLM
from airside.workers.models.mimo import MiMoForCausalLM
from airside.workers.parallel import RankGroup
from airside.workers.weights.weight_source import WeightSource

MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,  # a Llama with other biases
    "Qwen3ForCausalLM": LlamaForCausalLM,  # and one with norms in its attention
    "MiMoForCausalLM": MiMoForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Idefics3ForConditionalGeneration": Idefics3ForConditionalGeneration,
}


def load_model(config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> CausalModel:
    """This rank's part of the model. Raises CheckpointError naming a tensor that is missing or does not fit."""
    model: CausalModel = MODELS[config.architecture](config, weights, group, max_positions)
    return model
