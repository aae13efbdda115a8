"""Chooses the reader for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from airside.workers.model_config import CheckpointError
from airside.workers.weights.gguf_file import GgufFile
from airside.workers.weights.load_times import LoadTimes
from airside.workers.weights.safetensors_files import SafetensorsFiles
from airside.workers.weights.weight_source import WeightSource


def open_weights(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    times: LoadTimes | None = None,
) -> WeightSource:
    """The tensors of a checkpoint folder or a .gguf file.

    Args:
        quantization: as in WorkerSettings; "gguf" needs a .gguf file.
        times: gets the seconds of reading and packing.
    Raises:
        CheckpointError: the checkpoint cannot be read, or not so quantised.
    """
    weight_format = "int8" if quantization == "int8" else None
    if path.suffix == ".gguf" and path.is_file():
        return GgufFile(path, dtype, device, weight_format, times, keeps_blocks=quantization == "gguf")
    if quantization == "gguf":
        raise CheckpointError(f"{path} is not a .gguf file; set model.quantization to int8 or none")
    return SafetensorsFiles(path, dtype, device, weight_format, times)
