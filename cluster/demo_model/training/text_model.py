"""SmolLM2 with an adapter beside its frozen weights, as one function made for training on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from airside.cluster.demo_model.adapter import FUSED

PREFIX = "model.text_model."
HIDDEN = 576
HEADS = 9
KV_HEADS = 3
HEAD = 64
INTERMEDIATE = 1536
LAYERS = 30
ROPE_THETA = 100_000.0
EPSILON = 1e-5
RANKS = {"attention_in": 16, "attention_out": 8, "mlp_in": 8, "mlp_out": 8}
COLUMNS = {"attention_in": HIDDEN, "attention_out": HIDDEN, "mlp_in": HIDDEN, "mlp_out": INTERMEDIATE}
ROWS = {
    "attention_in": HEAD * (HEADS + 2 * KV_HEADS),
    "attention_out": HIDDEN,
    "mlp_in": 2 * INTERMEDIATE,
    "mlp_out": HIDDEN,
}
STRENGTH = 2.0  # what training multiplies the adapter's products by; the saved `widen` has it multiplied in

KeysValues = tuple[Tensor, Tensor]


class Pair(NamedTuple):
    """One fused matrix of one layer with its adapter: `merged` is the frozen matrix with the product already added."""

    merged: Tensor
    narrow: Tensor
    widen: Tensor


class Adapter(nn.Module):
    """The thin matrices, float32; new ones change nothing, because `widen` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.ParameterList()
        self.widen = nn.ParameterList()
        for _ in range(LAYERS):
            for fused, rank in RANKS.items():
                self.narrow.append(nn.Parameter(torch.randn(rank, COLUMNS[fused]) / math.sqrt(COLUMNS[fused])))
                self.widen.append(nn.Parameter(torch.zeros(ROWS[fused], rank)))

    def layer(self, layer: int, weights: dict[str, Tensor]) -> dict[str, Pair]:
        """The pairs of one layer by fused name, in bfloat16."""
        pairs = {}
        for i, fused in enumerate(RANKS, layer * len(RANKS)):
            narrow, widen = self.narrow[i].to(torch.bfloat16), self.widen[i].to(torch.bfloat16) * STRENGTH
            with torch.no_grad():
                pairs[fused] = Pair(torch.addmm(weights[fused], widen, narrow), narrow, widen)
        return pairs

    def named(self) -> dict[str, Tensor]:
        """As `merged` wants it."""
        names = [f"layers.{layer}.{fused}" for layer in range(LAYERS) for fused in RANKS]
        pairs = zip(names, self.narrow, self.widen, strict=True)
        return {
            f"{name}.{kind}": tensor
            for name, narrow, widen in pairs
            for kind, tensor in (("narrow", narrow.detach()), ("widen", widen.detach() * STRENGTH))
        }


class TextModel:
    """The frozen weights of a checkpoint, bfloat16.

    Args:
        folder: an assembled checkpoint; whatever adapter its weights were merged with counts as frozen too.
    """

    def __init__(self, folder: Path) -> None:
        with safe_open(folder / "model.safetensors", "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith(PREFIX)}  # noqa: SIM118
        self.embedding = weights[f"{PREFIX}embed_tokens.weight"]
        self._norm = weights[f"{PREFIX}norm.weight"]
        self._layers = [_fused(weights, f"{PREFIX}layers.{layer}.") for layer in range(LAYERS)]

    def __call__(
        self, embedded: Tensor, positions: Tensor, visible: Tensor, prompt: list[int], adapter: Adapter | None
    ) -> Tensor:
        """Last hidden states [rows, length, 576] of rows that all follow the same prompt.

        Args:
            embedded: [rows, length, 576] bfloat16.
            positions: [rows, length], the prompt's length included.
            visible: [rows, length, length] bool; the prompt is visible to all.
            prompt: token ids; an empty list is no prompt.
        """
        rows, length, _ = embedded.shape
        x, turned = embedded, _rotation(positions)
        mask = torch.zeros(rows, 1, length, len(prompt) + length)
        mask[..., len(prompt) :].masked_fill_(~visible[:, None], -1e9)
        before = self.embedding[torch.tensor([prompt], dtype=torch.long)]
        before_turned = _rotation(torch.arange(len(prompt))[None])
        before_mask = torch.full((len(prompt), len(prompt)), -1e9).triu(1)
        for number, weights in enumerate(self._layers):
            pairs = {} if adapter is None else adapter.layer(number, weights)
            past = None
            if prompt:
                before, past = _layer(before, before_turned, before_mask, None, weights, pairs)
            x, _ = _layer(x, turned, mask, past, weights, pairs)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., 49152] float32."""
        logits: Tensor = _normed(hidden, self._norm) @ self.embedding.T
        return logits.float()


def _fused(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    fused = {name: torch.cat([weights[f"{prefix}{part}.weight"] for part in parts]) for name, parts in FUSED.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        fused[norm] = weights[f"{prefix}{norm}.weight"]
    return fused


def _layer(
    x: Tensor,
    turned: tuple[Tensor, Tensor],
    mask: Tensor,
    past: KeysValues | None,
    weights: dict[str, Tensor],
    pairs: dict[str, Pair],
) -> tuple[Tensor, KeysValues]:
    rows, length, _ = x.shape
    h = _normed(x, weights["input_layernorm"])
    heads = _product("attention_in", h, weights, pairs).view(rows, length, -1, HEAD).transpose(1, 2)
    mixed, new = _attend(heads, *turned, mask, past)
    x = x + _product("attention_out", mixed, weights, pairs)
    h = _normed(x, weights["post_attention_layernorm"])
    gated = _gate(_product("mlp_in", h, weights, pairs))
    return x + _product("mlp_out", gated, weights, pairs), new


def _attention(
    heads: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor, past: KeysValues | None
) -> tuple[Tensor, KeysValues]:
    """heads: [rows, 15, length, 64], queries, keys, values. Returns [rows, length, 576] and the keys and values."""
    q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], 1)
    q, k = _turn(q, cosine, sine), _turn(k, cosine, sine)
    new = (k, v)
    if past is not None:
        k = torch.cat((past[0].expand(len(k), -1, -1, -1), k), 2)
        v = torch.cat((past[1].expand(len(v), -1, -1, -1), v), 2)
    k, v = (t[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(HEAD) + mask
    mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)
    return mixed.flatten(2), new


def _product(name: str, x: Tensor, weights: dict[str, Tensor], pairs: dict[str, Pair]) -> Tensor:
    if name not in pairs:
        return x @ weights[name].T
    product: Tensor = _Adapted.apply(x, *pairs[name])  # type: ignore[no-untyped-call]
    return product


class _Adapted(torch.autograd.Function):
    """x @ merged.T, whose gradient goes to the thin matrices and not to the merged one: what merging will compute,
    bfloat16 rounding included, at the cost of the frozen model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, merged: Tensor, narrow: Tensor, widen: Tensor) -> Tensor:  # Any: torch's own
        ctx.save_for_backward(x, merged, narrow, widen)
        return x @ merged.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        x, merged, narrow, widen = ctx.saved_tensors
        flat, flat_x = gradient.flatten(0, -2), x.flatten(0, -2)
        to_narrow = (flat @ widen).T @ flat_x
        to_widen = flat.T @ (flat_x @ narrow.T)
        return gradient @ merged, None, to_narrow, to_widen


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.float(), (HIDDEN,), eps=EPSILON).to(x.dtype) * weight


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def _rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    inverse = ROPE_THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angles = (positions[..., None].float() * inverse).repeat(1, 1, 2)[:, None]
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cosine + torch.cat((-high, low), -1) * sine


_attend = torch.compile(_attention, dynamic=True)
_normed = torch.compile(_norm, dynamic=True)
_gate = torch.compile(_gated, dynamic=True)
