"""The keys and values of every token in the cache, in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from airside.proto.settings import WorkerSettings
from airside.workers.model_config import ModelConfig
from airside.workers.state_slots import state_bytes, tail_bytes

_AUTO_BYTES_MAX = 2 * 1024**3  # on the CPU, where the memory is everybody's
_AUTO_SHARE_CPU = 0.25  # of what is available once the weights are loaded
_AUTO_SHARE_CUDA = 0.85


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's tensors, each [num_blocks, num_kv_heads, block_size, head_dim].

    Blocks can be copied whole; the order inside one head of a block is the kernels' own.
    """

    k: Tensor
    v: Tensor


def allocate_kv_cache(
    config: ModelConfig, settings: WorkerSettings, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """The cache of this rank: one entry per decoder layer that attends.

    Not zeroed: nothing is read before it is written, and on a CPU a page is taken when a block in it is first used.
    """
    shape = (num_blocks, *_block_shape(config, settings))

    def blocks() -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return [LayerCache(blocks(), blocks()) for _ in range(config.num_attention_layers)]


def allocate_draft_cache(
    config: ModelConfig, settings: WorkerSettings, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """The draft head's cache: `num_blocks` as the model has them, then each sequence's spare blocks.

    Zeros, since the head may read an entry that was never written.
    """
    num_spare = settings.max_num_seqs * spare_draft_blocks(settings)
    shape = (num_blocks + num_spare, *_block_shape(config, settings))
    return LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


def spare_draft_blocks(settings: WorkerSettings) -> int:
    """Blocks of the draft head for each sequence of a step, for the drafts that its block table has no place for."""
    return -(-max(0, settings.max_draft_tokens - 1) // settings.block_size)


def count_kv_blocks(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype, device: torch.device) -> int:
    """How many blocks this rank can hold; never more than `max_num_seqs` full sequences could use.

    Raises:
        MemoryError: not even one.
    """
    bytes_free = settings.kv_cache_bytes
    if bytes_free is None:
        bytes_free = _bytes_at_hand(settings, device)
    bytes_free -= state_bytes(config, settings, dtype) + _spare_bytes(config, settings, dtype)
    num_blocks = bytes_free // block_bytes(config, settings, dtype)
    num_blocks = min(num_blocks, settings.max_num_seqs * -(-settings.max_model_len // settings.block_size))
    if settings.num_kv_blocks_max is not None:
        num_blocks = min(num_blocks, settings.num_kv_blocks_max)
    if num_blocks < 1:
        raise MemoryError(
            f"{max(0, bytes_free)} bytes for KV hold no block of {block_bytes(config, settings, dtype)} bytes; "
            "raise engine.kv_cache_memory or lower engine.block_size"
        )
    return num_blocks


def block_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers of this rank, with what is kept beside it."""
    num_layers = config.num_attention_layers + config.num_draft_layers
    return num_layers * _layer_bytes(config, settings, dtype) + tail_bytes(config, settings, dtype)


def _block_shape(config: ModelConfig, settings: WorkerSettings) -> tuple[int, int, int]:
    return config.num_kv_heads // settings.world_size, settings.block_size, config.head_dim


def _layer_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    """Keys and values of one block in one layer."""
    return 2 * math.prod(_block_shape(config, settings)) * dtype.itemsize


def _spare_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    num_spare = config.num_draft_layers * settings.max_num_seqs * spare_draft_blocks(settings)
    return num_spare * _layer_bytes(config, settings, dtype)


def _bytes_at_hand(settings: WorkerSettings, device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _AUTO_SHARE_CUDA)
    available = psutil.virtual_memory().available
    return int(min(_AUTO_BYTES_MAX, available * _AUTO_SHARE_CPU)) // settings.world_size
