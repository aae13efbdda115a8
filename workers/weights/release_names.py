"""Names of the same tensors in checkpoints that different releases of transformers wrote."""

from __future__ import annotations

from airside.workers.weights.weight_source import WeightSource

DECODERS = ("language_model.model.", "model.language_model.")
HEADS = ("language_model.lm_head", "lm_head")
TOWERS = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
"""Of models whose decoder and vision tower are classes of their own."""


def find_name(weights: WeightSource, beginnings: tuple[str, ...], rest: str) -> str:
    """The first of `beginnings` with which the checkpoint has a tensor; if it has none, the likeliest, to be named."""
    return next((begin for begin in beginnings if weights.has(begin + rest)), beginnings[0])
