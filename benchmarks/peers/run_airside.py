"""Airside's `LLM`, of the environment that runs this."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import wire

CONFIG = Path(__file__).resolve().parents[2] / "cluster" / "local.yaml"
MODEL_KEYS = ("dtype", "quantization", "max_model_len")
"""Arguments of `LLM` that are keys of the model block; the others are the engine's."""


def is_installed() -> bool:
    """It is what is compared."""
    return True


def load(model: str, threads: int, options: dict[str, Any]) -> wire.Generate:
    """`options`: of `LLM`."""
    from airside.cluster.bench.offline import OfflineEngine

    return OfflineEngine(model, {"num_threads": threads, **options}).generate


def serve_command(model: str, threads: int, port: int, options: dict[str, Any]) -> list[str]:
    """Serves gRPC."""
    settings = {
        "model.source": model,
        "server.grpc.port": port,
        "server.metrics.port": 0,
        "engine.num_threads": threads,
        "engine.enable_prefix_caching": False,
        **{f"{'model' if name in MODEL_KEYS else 'engine'}.{name}": value for name, value in options.items()},
    }
    # JSON is YAML: true stays true, and a path that looks like a number a text.
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return [sys.executable, "-m", "airside.cluster.cli", "up", str(CONFIG), *words]


if __name__ == "__main__":
    wire.main(is_installed, load, serve_command)
