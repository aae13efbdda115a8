"""From settings to a model runner, ready for its KV cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from airside.proto.settings import WorkerSettings
from airside.workers.draft_head import DraftHead
from airside.workers.grammars import Grammars
from airside.workers.heap import give_back_free_memory
from airside.workers.model_config import (
    CheckpointError,
    check_block_size,
    check_tensor_parallel_size,
    load_model_config,
)
from airside.workers.model_runner import ModelRunner
from airside.workers.models.mimo import MiMoForCausalLM
from airside.workers.models.registry import load_model
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from airside.workers.weights.cached_weights import CachedWeights
from airside.workers.weights.load_times import LoadTimes
from airside.workers.weights.open_weights import open_weights
from airside.workers.weights.packed_cache import PackedCache

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def device_of(settings: WorkerSettings) -> torch.device:
    """The device of this rank; on CUDA the one with the rank's number, round and round."""
    if settings.device != "cuda":
        return torch.device(settings.device)
    return torch.device("cuda", settings.rank % max(1, torch.cuda.device_count()))


@torch.inference_mode()
def load_runner(
    settings: WorkerSettings, group: RankGroup, arena: PixelArena, times: LoadTimes | None = None
) -> ModelRunner:
    """Loads this rank's shard of the checkpoint.

    Args:
        times: gets the seconds of its parts.

    Raises:
        CheckpointError: the checkpoint is unsupported, incomplete or damaged, or its blocks are too small for it.
        TensorParallelSizeError: the group's size does not divide the model; nothing has been loaded then.
    """
    path = Path(settings.model_path)
    config = load_model_config(path)
    if settings.draft_method != "mtp":
        config = dataclasses.replace(config, num_draft_layers=0)
    elif config.num_draft_layers == 0:
        raise CheckpointError(
            f"{path}: {config.architecture} has no draft head; set engine.drafts.method to ngram or none"
        )
    check_tensor_parallel_size(config, settings.world_size)
    check_block_size(config, settings.block_size)
    device, dtype = device_of(settings), _DTYPES[settings.dtype]
    times = times or LoadTimes()
    weights = open_weights(path, dtype, device, settings.quantization, times)
    cache = _packed_cache(settings, path, group)
    if cache is not None:
        weights = CachedWeights(weights, cache, times)
    model = load_model(config, weights, group, settings.max_model_len)
    if cache is not None:
        cache.close()
    give_back_free_memory()
    drafter = None
    if config.num_draft_layers > 0:
        assert isinstance(model, MiMoForCausalLM)
        drafter = DraftHead(model, config, settings, group, dtype, device)
    grammars = Grammars(settings.model_path, config) if group.rank == 0 else None
    return ModelRunner(model, config, settings, dtype, device, arena, group, grammars=grammars, drafter=drafter)


def _packed_cache(settings: WorkerSettings, path: Path, group: RankGroup) -> PackedCache | None:
    """None where weights are not packed, or it is switched off."""
    if not settings.packed_cache or settings.device != "cpu":
        return None
    traits: dict[str, str | int] = {
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "rank": group.rank,
        "world_size": group.size,
    }
    return PackedCache(Path(settings.packed_cache), path, traits)
