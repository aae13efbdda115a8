"""One model worker's runner in this process, without a bus: what `airside bench step` and `kernels` measure."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from airside.cluster.config.schema import Config
from airside.cluster.launch_plan import LaunchPlan, Machine, Run
from airside.cluster.model_source import resolve
from airside.proto.messages import StepPlan
from airside.proto.settings import WorkerSettings
from airside.workers import ops
from airside.workers.load import load_runner
from airside.workers.model_config import ModelConfig, load_model_config
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena


class NotMeasurable(Exception):
    """The model, or what was asked of it, cannot be measured this way; the message says why."""


def worker_settings(model: str, values: Mapping[str, Any]) -> tuple[ModelConfig, WorkerSettings]:
    """The model's facts, and what its only rank would be told on this machine's CPU.

    Args:
        values: keys of the YAML file, block by block.
    Raises:
        ModelSourceError, CheckpointError, LaunchError, pydantic.ValidationError: as when a server starts.
    """
    from airside.cluster.bench.machine import num_cores

    path = resolve(model, print)
    config = load_model_config(path)
    model_block = {"source": model, **values.get("model", {})}
    engine_block = {"device": "cpu", **values.get("engine", {})}
    whole = Config.model_validate({**values, "model": model_block, "engine": engine_block})
    run = Run("bench", Path(tempfile.gettempdir()))
    plan = LaunchPlan(whole, config, path, run, Machine("local", num_cores(), 0), port=0)
    return config, plan.workers(1)[0]


def check_room(settings: WorkerSettings, num_rows: int, num_computed: int, num_new: int) -> None:
    """Whether the engine would make such a step, as `LoneRank.step` takes it. Raises NotMeasurable."""
    for key, most, asked in [
        ("engine.max_num_seqs", settings.max_num_seqs, num_rows),
        ("engine.max_num_batched_tokens", settings.max_num_batched_tokens, num_rows * num_new),
        ("model.max_model_len", settings.max_model_len, num_computed + num_new),
    ]:
        if asked > most:
            raise NotMeasurable(
                f"{key} is {most}, but a step of {num_rows} x {num_new} tokens after {num_computed} needs {asked}; "
                "ask for less, or set it higher with --set"
            )


class LoneRank:
    """A loaded model with room for so many sequences of so many tokens, whose blocks are its own.

    Raises:
        NotMeasurable: the model keeps more than keys and values, or is split over ranks.
    """

    def __init__(self, config: ModelConfig, settings: WorkerSettings, num_seqs: int, seq_tokens: int) -> None:
        if settings.world_size != 1:
            raise NotMeasurable("engine.tensor_parallel_size: one rank is measured alone; set it to 1")
        torch.set_num_threads(settings.num_threads)
        self.runner: ModelRunner = load_runner(settings, RankGroup(0, 1), PixelArena())
        if self.runner.num_state_slots or config.tail_tokens:
            raise NotMeasurable(f"{config.architecture} keeps more of a sequence than keys and values")
        self._block_size = settings.block_size
        self._blocks_each = -(-seq_tokens // settings.block_size)
        self.runner.allocate(num_seqs * self._blocks_each)
        self._next_step_id = 0

    @property
    def program(self) -> ops.Program | None:
        """The model's recorded step, if it could be recorded."""
        return self.runner.program

    def step(self, num_rows: int, num_computed: int, num_new: int, first_seq: int = 0) -> float:
        """Executes a step of rows that are alike: each computes `num_new` tokens and samples one. Returns its seconds.

        Args:
            num_computed: tokens that each has in the cache.
            first_seq: whose blocks the first row uses; the others use those after it.
        """
        plan = self._plan(num_rows, num_computed, num_new, first_seq)
        result = self.runner.execute(plan)
        assert result is not None
        return result.execute_s

    def _plan(self, num_rows: int, num_computed: int, num_new: int, first_seq: int) -> StepPlan:
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        seqs = np.arange(first_seq, first_seq + num_rows)
        num_blocks = -(-(num_computed + num_new) // self._block_size)
        tables = seqs[:, None] * self._blocks_each + np.arange(num_blocks)

        def i32(values: Any) -> bytes:  # Any: numbers, or an array of them
            return np.broadcast_to(np.asarray(values, np.int32), num_rows).tobytes()

        return StepPlan(
            step_id=step_id,
            seq_ids=seqs.astype(np.uint64).tobytes(),
            num_computed=i32(num_computed),
            num_new=i32(num_new),
            token_ids=(np.arange(num_rows * num_new, dtype=np.int32) % 101 + 64).astype(np.int32).tobytes(),
            num_blocks=i32(num_blocks),
            block_tables=tables.astype(np.int32).tobytes(),
            sampled=bytes([1]) * num_rows,
            temperature=np.zeros(num_rows, np.float32).tobytes(),
            top_k=i32(0),
            top_p=np.ones(num_rows, np.float32).tobytes(),
            min_p=np.zeros(num_rows, np.float32).tobytes(),
            seed=np.zeros(num_rows, np.uint64).tobytes(),
            position=np.zeros(num_rows, np.int64).tobytes(),
        )
