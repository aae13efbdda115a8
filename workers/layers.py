"""The parts of a Llama-style decoder layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from airside.workers import ops
from airside.workers.kv_cache import LayerCache
from airside.workers.model_config import ModelConfig, RopeAxes, RopeConfig
from airside.workers.parallel import ColumnParallelLinear, RankGroup, RowParallelLinear
from airside.workers.placed_rows import PlacedRows
from airside.workers.weights.weight_source import WeightSource


class RotaryTable:
    """cos and sin of every position, [max_positions, head_dim / 2] float32."""

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        angles = torch.arange(max_positions)[:, None].float() * inverse_frequencies(config.rope, config.head_dim)
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)
        self._axis_of_pair = None if config.rope_axes is None else _axis_of_pair(config.rope_axes).to(device)

    def rotate(self, q: Tensor, k: Tensor, batch: PlacedRows) -> None:
        """Turns the heads of the tokens of `batch`, [num_tokens, num_heads, head_dim] each, in place.

        Where the axes of a position differ, each pair of a head turns with its own axis.
        """
        if batch.positions.ndim == 1:
            ops.rotary_embedding(q, k, batch.positions, self.cos, self.sin)
            return
        assert self._axis_of_pair is not None, "positions on three axes, for a model with one"
        of_pair = batch.positions[self._axis_of_pair].long()  # [head_dim / 2, num_tokens]
        cos, sin = (table.t().gather(1, of_pair).t().contiguous() for table in (self.cos, self.sin))
        ops.rotary_embedding(q, k, torch.arange(len(cos), dtype=torch.int32, device=cos.device), cos, sin)


def _axis_of_pair(axes: RopeAxes) -> Tensor:
    """[head_dim / 2] int64."""
    sections = torch.tensor(axes.sections)
    return (torch.arange(len(sections)) % 3).repeat_interleave(sections)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each rotary pair (Su et al. 2021, arXiv 2104.09864)."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    return _stretch_long_waves(frequencies, rope) if rope.rope_type == "llama3" else frequencies


def _stretch_long_waves(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: waves longer than the trained context turn `factor` times slower, short ones as before.

    Between the two limits the change is blended linearly in the number of turns per trained context.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    result = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, frequencies)
    between = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(between, blended, result)


def norm_of_sum(x: Tensor | None, residual: Tensor, norm: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Adds `x`, if any, into the residual stream, in place; returns the norm of that.

    A norm and the addition before it are one operator, so a block's output is added when the next one reads.
    """
    if x is None:
        return ops.rms_norm(residual, norm, eps, zero_centred=zero_centred)
    return ops.add_rms_norm(x, residual, norm, eps, zero_centred=zero_centred)


def final_states(
    x: Tensor | None, residual: Tensor, wanted: Tensor, norm: Tensor, eps: float, *, zero_centred: bool = False
) -> Tensor:
    """[len(wanted), hidden]: the final norm of the tokens at `wanted` alone. `x`: what the last layer adds."""
    if wanted.numel() == 0:
        return residual[:0]
    assert x is not None, "a model without layers"
    x, residual = (ops.gather_rows(states, wanted) for states in (x, residual))
    return norm_of_sum(x, residual, norm, eps, zero_centred=zero_centred)


class Attention:
    """Grouped-query attention over the paged cache; query, key and value come from one product.

    Args:
        out: what the checkpoint calls the projection of the result.
        norms: what it calls the norms of each head's query and key, if the model has them.
        window: how many positions a token sees up to and with its own; 0: all.
    """

    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        config: ModelConfig,
        group: RankGroup,
        *,
        out: str = "o_proj",
        norms: tuple[str, str] = ("q_norm", "k_norm"),
        window: int = 0,
    ) -> None:
        self._heads = (
            config.num_heads // group.size,
            config.num_kv_heads // group.size,
            config.num_kv_heads // group.size,
        )
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self._window = window
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        self._qkv = ColumnParallelLinear(
            weights,
            (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            (q_size, kv_size, kv_size),
            config.hidden_size,
            group,
            bias=config.attention_bias,
        )
        self._out = RowParallelLinear(
            weights, f"{prefix}.{out}", config.hidden_size, q_size, group, bias=config.attention_out_bias
        )
        self._norms = [_HeadNorm(weights, f"{prefix}.{name}", config) for name in norms if config.qk_norm]

    def __call__(self, x: Tensor, batch: PlacedRows, rotary: RotaryTable, cache: LayerCache) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; writes the tokens' keys and values to the cache."""
        num_tokens = x.shape[0]
        q, k, v = self._qkv(x).view(num_tokens, -1, self._head_dim).split(self._heads, dim=1)  # type: ignore[no-untyped-call]
        if self._norms:
            q, k = (norm(heads) for norm, heads in zip(self._norms, (q, k), strict=True))
        rotary.rotate(q, k, batch)
        ops.kv_cache_write(k, v, cache.k, cache.v, batch.slots)
        out = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            self._scale,
            window=self._window,
            attend_to=batch.attend_to,
        )
        return self._out(out.view(num_tokens, -1))


class _HeadNorm:
    """Root-mean-square norm of each head by itself; one weight for all (Qwen3, arXiv 2505.09388)."""

    def __init__(self, weights: WeightSource, name: str, config: ModelConfig) -> None:
        self._weight = weights.read(f"{name}.weight", (config.head_dim,))
        self._eps = config.rms_norm_eps
        self._zero_centred = config.zero_centred_norms

    def __call__(self, heads: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> the same shape, contiguous."""
        return ops.head_rms_norm(heads, self._weight, self._eps, zero_centred=self._zero_centred)


class Mlp:
    """Llama's gated MLP; gate and up come from one product.

    Args:
        names: what the checkpoint calls gate, up and down.
        act: of the product: one of the gated activations of `ops`.
    """

    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        config: ModelConfig,
        group: RankGroup,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        act: Callable[[Tensor], Tensor] = ops.silu_and_mul,
    ) -> None:
        self._act = act
        inner = config.intermediate_size
        gate, up, down = names
        self._gate_up = ColumnParallelLinear(
            weights,
            (f"{prefix}.{gate}", f"{prefix}.{up}"),
            (inner, inner),
            config.hidden_size,
            group,
            bias=config.mlp_bias,
        )
        self._down = RowParallelLinear(
            weights, f"{prefix}.{down}", config.hidden_size, inner, group, bias=config.mlp_bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self._down(self._act(self._gate_up(x)))
