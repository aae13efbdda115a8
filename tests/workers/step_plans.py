"""Builds step plans by hand: a few sequences, their blocks, and what of them a step computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from airside.proto.messages import ImageRow, PixelsRef, StepPlan
from airside.proto.settings import WorkerSettings

BLOCK_SIZE = 4


@dataclass(slots=True)
class Track:
    """One sequence as the controller would follow it. Its blocks are scattered over the pool on purpose."""

    seq_id: int
    tokens: list[int]
    blocks: list[int]
    pixels: list[PixelsRef] = field(default_factory=list)
    image_places: list[list[int]] = field(default_factory=list)  # of each picture: the indices of its tokens
    computed: int = 0
    banned: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    def take(self, sampled: int) -> None:
        self.tokens.append(sampled)
        self.made.append(sampled)


def scattered_blocks(num_sequences: int, blocks_each: int, seed: int = 0) -> list[list[int]]:
    """Disjoint block tables in random order, from a pool of `num_sequences * blocks_each`."""
    order = np.random.default_rng(seed).permutation(num_sequences * blocks_each)
    return [part.tolist() for part in np.split(order, num_sequences)]


def plan_step(step_id: int, tracks: list[Track], num_new: list[int]) -> StepPlan:
    """Computes `num_new[i]` tokens of track i; a track whose last known token is among them samples, greedily."""
    ends = [track.computed + new for track, new in zip(tracks, num_new, strict=True)]
    sampling = [end == len(track.tokens) for track, end in zip(tracks, ends, strict=True)]
    tables = [track.blocks[: -(-end // BLOCK_SIZE)] for track, end in zip(tracks, ends, strict=True)]
    rows = [track for track, samples in zip(tracks, sampling, strict=True) if samples]
    images = [row for track, end in zip(tracks, ends, strict=True) for row in _image_rows(track, end)]
    flat = [token for track, end in zip(tracks, ends, strict=True) for token in track.tokens[track.computed : end]]
    return StepPlan(
        step_id=step_id,
        seq_ids=np.array([track.seq_id for track in tracks], np.uint64).tobytes(),
        num_computed=np.array([track.computed for track in tracks], np.int32).tobytes(),
        num_new=np.array(num_new, np.int32).tobytes(),
        token_ids=np.array(flat, np.int32).tobytes(),
        num_blocks=np.array([len(table) for table in tables], np.int32).tobytes(),
        block_tables=np.array([block for table in tables for block in table], np.int32).tobytes(),
        sampled=np.array(sampling, np.uint8).tobytes(),
        temperature=np.zeros(len(rows), np.float32).tobytes(),
        top_k=np.zeros(len(rows), np.int32).tobytes(),
        top_p=np.ones(len(rows), np.float32).tobytes(),
        min_p=np.zeros(len(rows), np.float32).tobytes(),
        seed=np.arange(len(rows), dtype=np.uint64).tobytes(),
        position=np.array([len(track.made) for track in rows], np.int64).tobytes(),
        banned={row: track.banned for row, track in enumerate(rows) if track.banned},
        images=images,
    )


def apply_step(tracks: list[Track], num_new: list[int], sampled: bytes) -> None:
    """What the controller does with a result: moves every track on, and gives new tokens to those that sampled."""
    tokens = iter(np.frombuffer(sampled, np.int32).tolist())
    for track, new in zip(tracks, num_new, strict=True):
        track.computed += new
        if track.computed == len(track.tokens):
            track.take(next(tokens))
    assert next(tokens, None) is None, "more tokens than rows that sample"


def run_tracks(
    execute: Callable[[StepPlan], bytes | None], tracks: list[Track], chunk: int, num_tokens: int
) -> list[list[int]]:
    """Runs all tracks together, at most `chunk` tokens of each per step, until each has made `num_tokens`."""
    step_id = 0
    while live := [track for track in tracks if len(track.made) < num_tokens]:
        num_new = [min(chunk, len(track.tokens) - track.computed) for track in live]
        sampled = execute(plan_step(step_id, live, num_new))
        assert sampled is not None
        apply_step(live, num_new, sampled)
        step_id += 1
    return [track.made for track in tracks]


def _image_rows(track: Track, end: int) -> list[ImageRow]:
    rows = []
    for index, (pixels, places) in enumerate(zip(track.pixels, track.image_places, strict=True)):
        touched = [rank for rank, place in enumerate(places) if track.computed <= place < end]
        if touched:
            rows.append(ImageRow(track.seq_id, index, touched[0], len(touched), pixels))
    return rows


def worker_settings(model_path: str, **changes: object) -> WorkerSettings:
    """Settings for one float32 rank on the CPU."""
    values: dict[str, object] = {
        "endpoint": "ipc:///nowhere",
        "name": "worker-0",
        "rank": 0,
        "world_size": 1,
        "group": 1,
        "rendezvous": "",
        "model_path": model_path,
        "dtype": "float32",
        "device": "cpu",
        "block_size": BLOCK_SIZE,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_bytes": None,
        "num_kv_blocks_max": 256,
        "num_threads": 1,
    }
    return WorkerSettings(**{**values, **changes})  # type: ignore[arg-type]
