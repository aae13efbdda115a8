"""The keys and values of every token in the cache, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from airside.proto.settings import WorkerSettings
from airside.workers.model_config import ModelConfig

_AUTO_BYTES_MAX = 2 * 1024**3  # on the CPU, where the memory is everybody's
_AUTO_SHARE_CPU = 0.25  # of what is available once the weights are loaded
_AUTO_SHARE_CUDA = 0.85


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's tensors, each [num_blocks, num_kv_heads, block_size, head_dim]."""

    k: Tensor
    v: Tensor


def allocate_kv_cache(
    config: ModelConfig, settings: WorkerSettings, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """The cache of this rank, one entry per layer.

    Not zeroed: nothing is read before it is written, and on a CPU a page is taken when a block in it is first used.
    """
    shape = (num_blocks, config.num_kv_heads // settings.world_size, settings.block_size, config.head_dim)

    def blocks() -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return [LayerCache(blocks(), blocks()) for _ in range(config.num_layers)]


def count_kv_blocks(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype, device: torch.device) -> int:
    """How many blocks this rank can hold; never more than `max_num_seqs` full sequences could use.

    Raises:
        MemoryError: not even one.
    """
    bytes_free = settings.kv_cache_bytes
    if bytes_free is None:
        bytes_free = _bytes_at_hand(settings, device)
    num_blocks = bytes_free // block_bytes(config, settings, dtype)
    num_blocks = min(num_blocks, settings.max_num_seqs * -(-settings.max_model_len // settings.block_size))
    if settings.num_kv_blocks_max is not None:
        num_blocks = min(num_blocks, settings.num_kv_blocks_max)
    if num_blocks < 1:
        raise MemoryError(
            f"{bytes_free} bytes for KV hold no block of {block_bytes(config, settings, dtype)} bytes; "
            "raise engine.kv_cache_memory or lower engine.block_size"
        )
    return num_blocks


def block_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers of this rank."""
    heads = config.num_kv_heads // settings.world_size
    return 2 * config.num_layers * heads * settings.block_size * config.head_dim * dtype.itemsize


def _bytes_at_hand(settings: WorkerSettings, device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _AUTO_SHARE_CUDA)
    available = psutil.virtual_memory().available
    return int(min(_AUTO_BYTES_MAX, available * _AUTO_SHARE_CPU)) // settings.world_size
