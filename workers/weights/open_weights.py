"""Chooses the reader for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from airside.workers.weights.gguf_file import GgufFile
from airside.workers.weights.safetensors_files import SafetensorsFiles
from airside.workers.weights.weight_source import WeightSource


def open_weights(path: Path, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """The tensors of a checkpoint folder or a .gguf file. Raises CheckpointError."""
    if path.suffix == ".gguf" and path.is_file():
        return GgufFile(path, dtype, device)
    return SafetensorsFiles(path, dtype, device)
