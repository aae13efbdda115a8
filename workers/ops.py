"""The one door to the kernels.

Every operator has the same name here, in the binding, in the kernel's file and in its test. `_kernels(tensor)` picks
the library by the device of the tensor; model code never asks which one. Activations are float32, bfloat16 or
float16 and contiguous unless a docstring says otherwise; all sums are taken in float32. A row's result does not depend
on the other rows of a call. Arguments of another rank, shape, dtype or layout, and ids outside their tensor, raise
ValueError.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

import airside
from airside.workers.packed_weight import PackedWeight, WeightMemory

_weight_memory = WeightMemory()

GGUF_BLOCK = 32
"""Inputs of one block of a GGUF tensor that `pack_blocks` takes."""

PANEL = 32
"""Rows of a packed weight that lie together."""


@functools.cache
def _library(device_type: str) -> Any:  # Any: a tvm-ffi module, whose functions are found by name
    path = Path(airside.__file__).parent / f"_kernels_{device_type}.so"
    if not path.exists():
        raise RuntimeError(
            f"Airside was built without {device_type} kernels ({path.name} is missing); set engine.device to cpu"
        )
    return tvm_ffi.load_module(str(path))


def _kernels(tensor: Tensor) -> Any:  # Any: as above
    return _library(tensor.device.type)


class Program:
    """Recorded operators, to be computed for steps of any size."""

    def __init__(self, device_type: str, handle: int) -> None:
        library = _library(device_type)
        self._library = library
        self._handle = handle
        self.names: list[str] = [library.op_name(handle, op) for op in range(library.count_ops(handle))]
        self._seconds: Tensor | None = None
        weakref.finalize(self, library.free_program, handle)

    def run(self, num_tokens: int, num_seqs: int, num_wanted: int) -> None:
        """Computes all operators, each over the first rows of the tensors it was recorded with.

        Raises:
            ValueError: the step is larger than those tensors.
        """
        if self._seconds is None:
            self._library.run_program(self._handle, num_tokens, num_seqs, num_wanted)
        else:
            self._library.time_program(self._handle, num_tokens, num_seqs, num_wanted, self._seconds)

    def start_timing(self) -> Tensor:
        """From now on, adds up the seconds of each operator, in the order of `names`, in what this returns."""
        self._seconds = torch.zeros(len(self.names), dtype=torch.float64)
        return self._seconds

    def stop_timing(self) -> None:
        """Runs are no longer timed."""
        self._seconds = None


class Recording:
    """While it is entered, this thread's operators are noted down, and not computed.

    The tensors that they are given must stay where they are as long as the program is used. Values in them are not
    looked at, so they are to be checked by whoever fills them in before a run.

    Args:
        num_tokens, num_seqs, num_wanted: rows of those tensors, the most that a step may have. An operator's rows are
            tokens or a multiple of them, or wanted ones; `num_wanted` is larger than `num_tokens` to tell them apart.
    """

    def __init__(self, num_tokens: int, num_seqs: int, num_wanted: int, device_type: str = "cpu") -> None:
        self._sizes = (num_tokens, num_seqs, num_wanted)
        self._device_type = device_type
        self._handle: int | None = None

    def __enter__(self) -> Recording:
        _library(self._device_type).begin_recording(*self._sizes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._handle = _library(self._device_type).end_recording()
        else:
            _library(self._device_type).drop_recording()

    def program(self) -> Program:
        """What was recorded, to be asked for once."""
        assert self._handle is not None, "nothing was recorded"
        handle, self._handle = self._handle, None
        return Program(self._device_type, handle)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Root-mean-square norm over the last axis: `round(x / sqrt(mean(x^2) + eps)) * weight`.

    The normalised value is rounded to x's dtype before it is multiplied, as Llama checkpoints were trained
    (Zhang & Sennrich 2019, arXiv 1910.07467). A zero-centred weight is the factor less 1, and the product is rounded
    once: `round(x / sqrt(mean(x^2) + eps) * (1 + weight))`, as Gemma's were.

    Args:
        x: [num_tokens, hidden]; rows may be strided.
        weight: [hidden], x's dtype.
    Returns: [num_tokens, hidden], x's dtype.
    """
    out = torch.empty_like(x)
    _kernels(x).rms_norm(x, weight, eps, zero_centred, out)
    return out


def head_rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """`rms_norm` of each head by itself, with one weight for all.

    Args:
        x: [num_tokens, num_heads, head_dim]; tokens may be strided (a slice of a fused projection), heads contiguous.
        weight: [head_dim], x's dtype.
    Returns: x's shape, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _kernels(x).head_rms_norm(x, weight, eps, zero_centred, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Adds `x` into `residual` in place, then returns `rms_norm(residual)`.

    Args:
        x, residual: [num_tokens, hidden], one dtype. `residual` is overwritten with the (rounded) sum. x's rows may
            be strided.
        weight: [hidden].
    Returns: [num_tokens, hidden].
    """
    out = torch.empty_like(x)
    _kernels(x).add_rms_norm(x, residual, weight, eps, zero_centred, out)
    return out


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q and k in place, in the half-split layout of Llama (Su et al. 2021, arXiv 2104.09864).

    Pairs are `(x[i], x[i + head_dim / 2])`. cos and sin are rounded to q's dtype, each product and their sum too, as
    transformers does, so that bfloat16 results agree.

    Args:
        q: [num_tokens, num_heads, head_dim]; rows may be strided (a slice of a fused projection), heads contiguous.
        k: [num_tokens, num_kv_heads, head_dim]; likewise.
        positions: [num_tokens] int32.
        cos, sin: [max_positions, head_dim / 2] float32.
    """
    _kernels(q).rotary_embedding(q, k, positions, cos, sin)


def kv_cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stores each token's key and value in its slot.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim]; rows may be strided.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], k's dtype. The order of the elements inside
            `[block, head]` is the kernels' own: only this and `paged_attention` can read or write them.
        slots: [num_tokens] int64, `block_id * block_size + offset`.
    """
    _kernels(k).kv_cache_write(k, v, k_cache, v_cache, slots)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    attend_to: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over the paged cache, for any mix of prefill chunks and decodes.

    Sequence i has `query_starts[i + 1] - query_starts[i]` query rows, which are the last tokens of its context of
    `context_lens[i]` tokens (their keys already in the cache). The row at position p attends to `[p + 1 - window,
    p + 1)`; `attend_to` moves the end. Query head h reads KV head `h // (num_heads / num_kv_heads)`. Softmax in
    float32, one fixed order of summation whatever the batch or chunking; in bfloat16 the weights are rounded to it
    before they multiply the values, and their sum is that of the rounded ones.

    Args:
        q: [num_tokens, num_heads, head_dim]; rows may be strided.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], as `kv_cache_write` left them. What was
            never written may hold anything: what a row does not see has no part in its result.
        block_tables: [num_seqs, max_blocks] int32, rows may be strided; entries past a sequence's context are not
            read.
        query_starts: [num_seqs + 1] int32, starting with 0.
        context_lens: [num_seqs] int32.
        scale: usually head_dim ** -0.5.
        window: how many positions a row sees up to and with its own; 0: all.
        attend_to: [num_tokens] int32: the end of what each row sees, beyond its own position and within the context;
            None: causal attention.
    Returns: [num_tokens, num_heads, head_dim], q's dtype, contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _kernels(q).paged_attention(
        q, k_cache, v_cache, block_tables, query_starts, context_lens, scale, window, attend_to, out
    )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused projection; silu is rounded to the dtype before the product.

    Args:
        gate_up: [num_tokens, 2 * intermediate]: gate first, then up; rows may be strided.
    Returns: [num_tokens, intermediate].
    """
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    _kernels(gate_up).silu_and_mul(gate_up, out)
    return out


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` with gelu's tanh form (Hendrycks & Gimpel 2016, arXiv 1606.08415); else as `silu_and_mul`."""
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    _kernels(gate_up).gelu_tanh_and_mul(gate_up, out)
    return out


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`.

    Args:
        x: [any, width]; rows may be strided.
        rows: [num_rows] int64.
    Returns: [num_rows, width], contiguous.
    """
    out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    _kernels(x).gather_rows(x, rows, out)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token per row.

    A row of temperature 0 takes the largest logit (the lowest id among equals). Others divide by the temperature,
    keep the top_k largest, then the smallest set whose mass reaches top_p, then what reaches min_p times the
    largest probability, and draw from what is left with one uniform number, the first 53 bits of Philox-4x32-10
    (Salmon et al. 2011) of key `seed` and counter `position`: the first id, counting upwards, at which the running sum
    of probabilities passes it. Of equal logits the lower ids are kept. The largest logit always stays.

    A logit of -inf or NaN has no probability; one of +inf has all of it. A row of nothing else than -inf and NaN gives
    -1, which is no token.

    Args:
        logits: [num_rows, vocab] float32; rows may be strided.
        temperature, top_p, min_p: [num_rows] float32. A top_p from 1 on and a min_p of 0 keep all; a temperature that
            is not above 0 counts as 0.
        top_k: [num_rows] int32; 0 keeps all.
        seed: [num_rows] int64 (the bits of an unsigned seed).
        position: [num_rows] int64: how many tokens the sequence had made.
    Returns: [num_rows] int32.
    """
    out = torch.empty((logits.shape[0],), dtype=torch.int32, device=logits.device)
    _kernels(logits).sample(logits, temperature, top_k, top_p, min_p, seed, position, out)
    return out


def token_logprobs(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row's softmax p: the log-probability of one token, how much is less likely, and the likeliest k.

    Logits of -inf and NaN have no probability; those of +inf share all of it.

    Args:
        logits: [num_rows, vocab] float32; rows may be strided.
        targets: [num_rows] int32.
        k: alternatives, from 0 on.
    Returns:
        `log p(target)` [num_rows] float32; the sum of all p(u) with p(u) < p(target) [num_rows] float32;
        ids of the k largest, largest first, of equals the lower id first, [num_rows, k] int32, -1 where there are
        fewer; their log p [num_rows, k] float32, -inf where there are fewer.
    """
    rows, device = logits.shape[0], logits.device
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    sums_smaller = torch.empty(rows, dtype=torch.float32, device=device)
    top_ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    top_logprobs = torch.empty((rows, k), dtype=torch.float32, device=device)
    _kernels(logits).token_logprobs(logits, targets, logprobs, sums_smaller, top_ids, top_logprobs)
    return logprobs, sums_smaller, top_ids, top_logprobs


def pack_weight(weight: Tensor, format: str) -> PackedWeight:
    """Lays out the weight of a linear layer for `linear`, once.

    Args:
        weight: [out_features, in_features], of the dtype that the format names; for "int8" of any.
        format: "float32", "bfloat16", "float16", or "int8": a scale per output feature, max|w| / 127, and weights as
            multiples of it to nearest, ties to even.
    """
    packed = empty_packed(format, *weight.shape)
    pack_rows(packed, 0, weight)
    return packed


def empty_packed(format: str, out_features: int, in_features: int) -> PackedWeight:
    """What `pack_weight` returns, not filled in yet."""
    data = _weight_memory.take(_library("cpu").packed_bytes(format, out_features, in_features))
    return PackedWeight(data, format, out_features, in_features)


def pack_rows(packed: PackedWeight, first: int, rows: Tensor) -> None:
    """Fills in rows of a packed weight.

    Args:
        first: the first of them, a multiple of `PANEL`.
        rows: [num_rows, in_features], as `pack_weight` takes them; a multiple of `PANEL`, or up to the last one.
    """
    end, kernels = first + len(rows), _kernels(rows)
    assert first % PANEL == 0
    assert end == packed.out_features or (end < packed.out_features and end % PANEL == 0)
    begin, size = (kernels.packed_bytes(packed.format, count, packed.in_features) for count in (first, len(rows)))
    kernels.pack_weight(rows, packed.format, packed.data[begin : begin + size])


def pack_blocks(blocks: Tensor, format: str) -> PackedWeight:
    """Lays out the blocks of a GGUF tensor for `linear`, once; they keep their values.

    Args:
        blocks: [out_features, bytes of a row] uint8, as the file holds them.
        format: "q8_0", "q4_0" or "q4_1".
    """
    kernels, (out_features, row_bytes) = _kernels(blocks), blocks.shape
    in_features = row_bytes // kernels.block_bytes(format) * GGUF_BLOCK
    data = _weight_memory.take(kernels.packed_bytes(format, out_features, in_features))
    kernels.pack_blocks(blocks, format, data)
    return PackedWeight(data, format, out_features, in_features)


def gather_packed_rows(weight: PackedWeight, rows: Tensor) -> Tensor:
    """`w[rows]` of the matrix w that was packed, to the bit.

    Args:
        weight: of a format that keeps all bits (`is_exact`).
        rows: [num_rows] int64.
    Returns: [num_rows, in_features], contiguous, of the format's dtype.
    """
    out = torch.empty((rows.shape[0], weight.in_features), dtype=getattr(torch, weight.format), device=rows.device)
    _kernels(rows).gather_packed_rows(weight.data, weight.format, weight.out_features, weight.in_features, rows, out)
    return out


def weight_layout() -> int:
    """The version of the order of a packed weight's bytes."""
    return int(_library("cpu").weight_layout())


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 in one order, the bias added last and the result rounded once.

    With quantised weights, x is quantised too: multiples, to nearest, of a scale of its own, max|x| / 127, per row
    ("int8") or per block of 32 inputs (GGUF's). A row with an infinity or NaN gives NaN.

    Where the processor multiplies bfloat16 pairs itself, it takes subnormal numbers for 0.

    Args:
        x: [num_rows, in_features]; rows may be strided. Of the weight's dtype where that is a float.
        bias: [out_features], x's dtype.
    Returns: [num_rows, out_features], x's dtype.
    """
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    _kernels(x).linear(x, weight.data, weight.format, weight.out_features, weight.in_features, bias, out)
    return out


def process_start_time(pid: int) -> int:
    """When a process started, in the system's clock ticks; 0: there is none that this one sees, or it has ended."""
    return int(_library("cpu").process_start_time(pid))


def rank_memory_bytes(num_ranks: int) -> int:
    """The size of a file for `open_rank_memory`."""
    return int(_library("cpu").rank_memory_bytes(num_ranks))


def open_rank_memory(fd: int, rank: int, processes: Tensor, patience_s: float) -> int:
    """Maps memory through which the ranks of one node exchange tensors; a handle for the operators below.

    One thread of each rank calls them, in the same order and with the same shapes on all ranks. They raise
    RuntimeError, naming the rank, when one that they wait for is gone or does not answer for `patience_s`.

    Args:
        fd: a file of `rank_memory_bytes(num_ranks)` zeros, one for all ranks; may be closed afterwards.
        processes: [num_ranks, 2] int64: each rank's pid and `process_start_time`.
    """
    return int(_library("cpu").rank_memory_open(fd, rank, processes, patience_s))


def close_rank_memory(handle: int) -> None:
    """Unmaps it, and tells the ranks that wait for this one."""
    _library("cpu").rank_memory_close(handle)


def all_reduce_sum(x: Tensor, handle: int, *, out: Tensor | None = None) -> Tensor:
    """The sum over all ranks, on every rank: in float32, in the order of the ranks, rounded once.

    Args:
        x: [num_rows, columns].
        handle: from `open_rank_memory`.
        out: as x, which it may be; None: a new tensor.
    Returns: `out`.
    """
    out = torch.empty_like(x) if out is None else out
    _kernels(x).all_reduce_sum(x, handle, out)
    return out


def gather_columns(part: Tensor, handle: int, num_ranks: int | None) -> Tensor | None:
    """On rank 0, the ranks' parts side by side; on others None.

    Args:
        part: [num_rows, columns].
        handle: from `open_rank_memory`.
        num_ranks: on rank 0; None on others.
    Returns: [num_rows, num_ranks * columns].
    """
    out = None if num_ranks is None else part.new_empty((part.shape[0], num_ranks * part.shape[1]))
    _kernels(part).gather_columns(part, handle, out)
    return out


def broadcast(tokens: Tensor, handle: int) -> None:
    """Overwrites the tensor with rank 0's.

    Args:
        tokens: [count] int32.
        handle: from `open_rank_memory`.
    """
    _kernels(tokens).broadcast(tokens, handle)
