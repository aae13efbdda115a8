"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

import torch
from torch import Tensor

from airside.workers.model_config import ModelConfig
from airside.workers.parallel import RankGroup, RowParallelLinear
from airside.workers.state_slots import LayerState, StateRows
from airside.workers.weights.weight_source import MatrixPart, WeightSource


class ShortConv:
    """Each channel by itself: a causal convolution between two gates. Each rank has its part of the channels."""

    def __init__(self, weights: WeightSource, prefix: str, config: ModelConfig, group: RankGroup) -> None:
        assert config.short_conv is not None
        hidden, bias = config.hidden_size, config.short_conv.bias
        own = group.shard(hidden)

        # This rank's channels of the input gate, the output gate and the value, which are one tensor.
        channels = [slice(at + own.start, at + own.stop) for at in (0, hidden, 2 * hidden)]
        name = f"{prefix}.in_proj"
        biases = [weights.read(f"{name}.bias", (3 * hidden,), part) for part in channels] if bias else []
        self._in = weights.linear(
            [MatrixPart(f"{name}.weight", (3 * hidden, hidden), part) for part in channels],
            torch.cat(biases) if bias else None,
        )
        taps = weights.read(f"{prefix}.conv.weight", (hidden, 1, config.short_conv.kernel_size), own)
        self._taps = taps[:, 0].T.float().contiguous()
        self._bias = weights.read(f"{prefix}.conv.bias", (hidden,), own).float() if bias else None
        self._out = RowParallelLinear(weights, f"{prefix}.out_proj", hidden, hidden, group, bias=bias)

    def __call__(self, x: Tensor, rows: StateRows, state: LayerState) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; keeps the inputs that later rows read."""
        gate_in, gate_out, value = self._in(x).chunk(3, dim=1)
        extended = state.extend(gate_in * value, rows)
        return self._out(gate_out * convolve(extended, rows.tokens, self._taps, self._bias).to(x.dtype))


def convolve(extended: Tensor, tokens: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """The sum over i of `taps[i] * extended[token - (n - 1) + i]`, oldest first, for each token.

    Products and sums are operations of their own, each rounded: fused in some lanes and not in others, they would
    depend on where in the batch a token stands.

    Args:
        extended: [num_extended, channels], any float dtype.
        tokens: [num_tokens] int64, places in `extended`.
        taps: [n, channels] float32.
        bias: [channels] float32, added last.
    Returns: [num_tokens, channels] float32.
    """
    first = tokens - (len(taps) - 1)
    total = extended.index_select(0, first).float() * taps[0]
    for i in range(1, len(taps)):
        total += extended.index_select(0, first + i).float() * taps[i]
    return total if bias is None else total + bias
