"""The trained change to the text model's weights: for each fused matrix of each layer a product of two thin ones."""

from __future__ import annotations

import torch
from torch import Tensor

# Matrices that read the same input share one thin matrix: the fused name, then the checkpoint's names in row order.
FUSED = {
    "attention_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
}


def merged(weights: dict[str, Tensor], adapter: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The weights with the adapter's products added, in their own dtype.

    Args:
        weights: `{prefix}layers.{i}.{name}.weight` [rows, columns], and others, which come back as they are.
        adapter: `layers.{i}.{fused}.narrow` [rank, columns] and `.widen` [rows of all its matrices, rank].
    """
    out = dict(weights)
    for key in adapter:
        place, kind = key.rsplit(".", 1)
        if kind != "narrow":
            continue
        layer, fused = place.rsplit(".", 1)
        names = [f"{prefix}{layer}.{name}.weight" for name in FUSED[fused]]
        change = adapter[f"{place}.widen"].float() @ adapter[key].float()
        for name, part in zip(names, torch.split(change, [weights[name].shape[0] for name in names]), strict=True):
            out[name] = (weights[name].float() + part).to(weights[name].dtype)
    return out
