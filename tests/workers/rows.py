"""Chosen rows through a model without a runner, and plans for models that look back or keep a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from airside.proto.messages import StepPlan, StepResult
from airside.workers.kv_cache import allocate_kv_cache
from airside.workers.model_config import load_model_config
from airside.workers.models.registry import load_model
from airside.workers.parallel import RankGroup
from airside.workers.state_slots import count_state_slots
from airside.workers.step_batch import StepBatch, build_step_batch, read_rows
from airside.workers.weights.open_weights import open_weights
from tests.workers.step_plans import BLOCK_SIZE, Track, worker_settings

CPU = torch.device("cpu")
NUM_BLOCKS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Execute = Callable[[StepPlan], StepResult | None]


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `[start, end)` of a sequence."""

    tokens: list[int]
    start: int
    end: int
    blocks: list[int]
    slot: int = 0
    state_from: int = -1


def plan_rows(rows: list[Row], tail_tokens: int = 0, *, has_state: bool = True) -> StepPlan:
    """A plan that computes these rows and samples nothing."""

    def i32(values: list[int]) -> bytes:
        return np.array(values, np.int32).tobytes()

    tables = [row.blocks[: -(-row.end // BLOCK_SIZE)] for row in rows]
    tails = [row.tokens[i] if i >= 0 else -1 for row in rows for i in range(row.start - tail_tokens, row.start)]
    return StepPlan(
        step_id=0,
        seq_ids=np.arange(len(rows), dtype=np.uint64).tobytes(),
        num_computed=i32([row.start for row in rows]),
        num_new=i32([row.end - row.start for row in rows]),
        token_ids=i32([token for row in rows for token in row.tokens[row.start : row.end]]),
        num_blocks=i32([len(table) for table in tables]),
        block_tables=i32([block for table in tables for block in table]),
        sampled=bytes(len(rows)),
        temperature=b"",
        top_k=b"",
        top_p=b"",
        min_p=b"",
        seed=b"",
        position=b"",
        state_slots=i32([row.slot for row in rows]) if has_state else b"",
        state_from=i32([row.state_from for row in rows]) if has_state else b"",
        tail_ids=i32(tails),
    )


class Rig:
    """A model of one rank with its caches."""

    def __init__(
        self, path: Path, *, dtype: str = "float32", max_draft_tokens: int = 0, quantization: str = "none"
    ) -> None:
        self.config = load_model_config(path)
        settings = worker_settings(str(path), dtype=dtype, max_draft_tokens=max_draft_tokens)
        weights = open_weights(path, DTYPES[dtype], CPU, quantization)
        self._model = load_model(self.config, weights, RankGroup(0, 1), settings.max_model_len)
        self._cache = allocate_kv_cache(self.config, settings, NUM_BLOCKS, DTYPES[dtype], CPU)
        self._num_slots = count_state_slots(self.config, settings)
        self._model.allocate_states(self._num_slots, NUM_BLOCKS, max_draft_tokens)

    def batch(self, rows: list[Row]) -> StepBatch:
        """The rows as one step; the final states of all tokens are wanted."""
        plan = plan_rows(rows, self.config.tail_tokens, has_state=self._num_slots > 0)
        return build_step_batch(plan, read_rows(plan), BLOCK_SIZE, NUM_BLOCKS, CPU, all_wanted=True)

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Tensor]:
        """The logits of each row's tokens, [end - start, vocab] each."""
        batch = self.batch(rows)
        final = self._model.forward(self._model.embed(batch.token_ids), batch, self._cache)
        logits = self._model.logits(final)
        assert logits is not None
        return list(logits.split([row.end - row.start for row in rows]))

    def in_chunks(self, tokens: list[int], blocks: list[int], chunk: int, slot: int = 0) -> Tensor:
        """The logits of a whole sequence, computed alone and so many tokens at a time."""
        starts = range(0, len(tokens), chunk)
        rows = [Row(tokens, start, min(start + chunk, len(tokens)), blocks, slot) for start in starts]
        return torch.cat([self.step([row])[0] for row in rows])


def with_columns(execute: Execute, tracks: list[Track], *, tail_tokens: int = 0, has_state: bool = False) -> Execute:
    """`execute` with the columns that some models need: the tokens before each row, and a slot for each sequence."""
    tokens_of = {track.seq_id: track.tokens for track in tracks}

    def filled(plan: StepPlan) -> StepResult | None:
        seq_ids = np.frombuffer(plan.seq_ids, np.uint64).astype(np.int32)
        starts = np.frombuffer(plan.num_computed, np.int32)
        tails = [
            tokens_of[seq_id][place] if place >= 0 else -1
            for seq_id, start in zip(seq_ids.tolist(), starts.tolist(), strict=True)
            for place in range(start - tail_tokens, start)
        ]
        return execute(
            dataclasses.replace(
                plan,
                tail_ids=np.array(tails, np.int32).tobytes(),
                state_slots=seq_ids.tobytes() if has_state else b"",
                state_from=np.full(len(seq_ids), -1, np.int32).tobytes() if has_state else b"",
            )
        )

    return filled
