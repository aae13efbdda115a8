"""How a model's weights are held while they are measured, and which of the machine's limits that leaves known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airside.cluster.bench.machine import Limits
from airside.workers.model_config import ModelConfig

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Precision:
    """Two keys of the YAML file's model block; dtype is never auto."""

    dtype: str
    quantization: str = "none"

    def __str__(self) -> str:
        return self.dtype if self.quantization == "none" else f"{self.dtype}, quantization {self.quantization}"

    @property
    def notes(self) -> list[str]:
        """For a report with limits."""
        return {
            "int8": [
                "limits: 8 bits a weight; none where arithmetic may be the limit, which is not measured in 8 bits"
            ],
            "gguf": ["limits: none, since each tensor of the file has a format of its own"],
        }.get(self.quantization, [])

    @property
    def weight_bytes(self) -> int | None:
        """Of one weight of a linear layer. None: each tensor of the file has a format of its own."""
        return {"none": DTYPE_BYTES[self.dtype], "int8": 1}.get(self.quantization)

    def least_seconds(self, limits: Limits, num_weights: float, num_flop: float, num_bytes: float = 0) -> float | None:
        """What reading so many weights and multiplying with them takes at the least. None: not known.

        What 8 bits can be multiplied at was not measured: with them, reading is the limit only of what takes longer to
        read than to multiply even in dtype.

        Args:
            limits: measured in dtype.
            num_bytes: that are read or written beside the weights.
        """
        if self.weight_bytes is None:
            return None
        read = num_weights * self.weight_bytes + num_bytes
        seconds = limits.least_seconds(read, num_flop)
        if self.quantization != "none" and seconds > limits.least_seconds(read, 0):
            return None
        return seconds


def precision_of(config: ModelConfig, options: Mapping[str, Any]) -> Precision:  # Any: arguments of `LLM`
    """What `LLM` holds a model's weights in, given its arguments."""
    asked = str(options.get("dtype", "auto"))
    dtype = next((each for each in (asked, config.dtype) if each in DTYPE_BYTES), "bfloat16")
    return Precision(dtype, options.get("quantization", "none"))
