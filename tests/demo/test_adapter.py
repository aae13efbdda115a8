"""Adding an adapter's products to the weights equals applying them beside the weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from airside.cluster.demo_model.adapter import FUSED, merged

SIZES = {
    "self_attn.q_proj": (12, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 12),
    "mlp.gate_proj": (20, 8),
    "mlp.up_proj": (20, 8),
    "mlp.down_proj": (8, 20),
}
RANK = 3


def made() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    weights = {f"model.layers.1.{name}.weight": torch.randn(size, generator=generator) for name, size in SIZES.items()}
    adapter = {}
    for fused, names in FUSED.items():
        rows = sum(SIZES[name][0] for name in names)
        adapter[f"layers.1.{fused}.narrow"] = torch.randn(RANK, SIZES[names[0]][1], generator=generator)
        adapter[f"layers.1.{fused}.widen"] = torch.randn(rows, RANK, generator=generator)
    return weights, adapter


def test_merging_equals_applying() -> None:
    weights, adapter = made()
    whole = merged(weights, adapter, "model.")
    for fused, names in FUSED.items():
        x = torch.randn(5, SIZES[names[0]][1])
        beside = x @ adapter[f"layers.1.{fused}.narrow"].T @ adapter[f"layers.1.{fused}.widen"].T
        applied = torch.cat([functional.linear(x, weights[f"model.layers.1.{name}.weight"]) for name in names], -1)
        together = torch.cat([functional.linear(x, whole[f"model.layers.1.{name}.weight"]) for name in names], -1)
        torch.testing.assert_close(together, applied + beside, atol=1e-4, rtol=1e-4)


def test_what_the_adapter_does_not_name_stays_and_so_does_the_dtype() -> None:
    weights, adapter = made()
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    weights["model.norm.weight"] = torch.ones(8)
    whole = merged(weights, adapter, "model.")
    assert whole["model.norm.weight"] is weights["model.norm.weight"]
    assert all(tensor.dtype == weights[name].dtype for name, tensor in whole.items())
    assert not torch.equal(whole["model.layers.1.mlp.down_proj.weight"], weights["model.layers.1.mlp.down_proj.weight"])
