"""Builds step plans by hand: a few sequences, their blocks, and what of them a step computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from airside.proto.messages import ImageRow, OpenedRow, PixelsRef, PromptLogprobRow, StepPlan, StepResult
from airside.proto.settings import WorkerSettings
from airside.workers.load import load_runner
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from airside.workers.sampling_batch import tokens_that_count

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
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    drafts: list[int] = field(default_factory=list)  # to be verified by the next step that samples
    forced: list[int] = field(default_factory=list)  # by place in the output
    rules: Rules | None = None  # opened with the first step
    logprobs: int = -1
    prompt_logprobs: int = -1
    structured: bool = False
    drafts_wanted: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) - len(self.made)

    def take(self, sampled: list[int]) -> None:
        """Tokens that count, all but the last of which were drafts."""
        self.computed += len(sampled) - 1
        self.tokens += sampled
        self.made += sampled
        self.drafts = []


@dataclass(frozen=True, slots=True)
class Rules:
    """As in `OpenedRow`."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)


def scattered_blocks(num_sequences: int, blocks_each: int, seed: int = 0) -> list[list[int]]:
    """Disjoint block tables in random order, from a pool of `num_sequences * blocks_each`."""
    order = np.random.default_rng(seed).permutation(num_sequences * blocks_each)
    return [part.tolist() for part in np.split(order, num_sequences)]


def plan_step(step_id: int, tracks: list[Track], num_new: list[int]) -> StepPlan:
    """Computes `num_new[i]` tokens of track i; one whose last known token is among them samples, its drafts too."""
    ends = [track.computed + new for track, new in zip(tracks, num_new, strict=True)]
    drafts = [track.drafts if end == len(track.tokens) else [] for track, end in zip(tracks, ends, strict=True)]
    counts = [
        1 + len(own) if end == len(track.tokens) else 0 for track, end, own in zip(tracks, ends, drafts, strict=True)
    ]
    rows = list(zip(tracks, ends, drafts, strict=True))
    tables = [track.blocks[: -(-(end + len(own)) // BLOCK_SIZE)] for track, end, own in rows]
    flat = [token for track, end, own in rows for token in [*track.tokens[track.computed : end], *own]]
    sampling = [(track, count) for track, count in zip(tracks, counts, strict=True) if count > 0]
    return StepPlan(
        step_id=step_id,
        seq_ids=np.array([track.seq_id for track in tracks], np.uint64).tobytes(),
        num_computed=_i32([track.computed for track in tracks]),
        num_new=_i32([new + len(own) for new, own in zip(num_new, drafts, strict=True)]),
        token_ids=_i32(flat),
        num_blocks=_i32([len(table) for table in tables]),
        block_tables=_i32([block for table in tables for block in table]),
        sampled=np.array(counts, np.uint8).tobytes(),
        temperature=np.array([track.temperature for track, _ in sampling], np.float32).tobytes(),
        top_k=_i32([track.top_k for track, _ in sampling]),
        top_p=np.array([track.top_p for track, _ in sampling], np.float32).tobytes(),
        min_p=np.zeros(len(sampling), np.float32).tobytes(),
        seed=np.array([track.seed for track, _ in sampling], np.uint64).tobytes(),
        position=np.array([len(track.made) for track, _ in sampling], np.int64).tobytes(),
        images=[row for track, end, _ in rows for row in _image_rows(track, end)],
        prompt_logprobs=_prompt_rows(rows),
        opened=[_opened(track) for track in tracks if track.rules is not None and track.computed == 0],
        **_optional_columns(sampling),
    )


def _i32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def _optional_columns(sampling: list[tuple[Track, int]]) -> dict[str, Any]:  # Any: bytes, and one dict
    """Those that are empty when no row needs them. `sampling`: tracks that sample, and how many positions."""
    places = [(track, len(track.made) + j) for track, count in sampling for j in range(count)]
    columns: dict[str, Any] = {
        "banned": {flat: track.banned for flat, (track, _) in enumerate(places) if track.banned},
    }
    if any(track.forced for track, _ in sampling):
        columns["forced"] = _i32([track.forced[at] if at < len(track.forced) else -1 for track, at in places])
    if any(track.logprobs >= 0 for track, _ in sampling):
        columns["logprobs"] = _i32([track.logprobs for track, _ in sampling])
    if any(track.structured for track, _ in sampling):
        columns["structured"] = bytes(track.structured for track, _ in sampling)
    if any(track.drafts_wanted for track, _ in sampling):
        columns["drafts_wanted"] = _i32([track.drafts_wanted for track, _ in sampling])
    return columns


def _prompt_rows(rows: list[tuple[Track, int, list[int]]]) -> list[PromptLogprobRow]:
    found = []
    for index, (track, end, _) in enumerate(rows):
        targets = track.tokens[track.computed + 1 : min(end + 1, track.num_prompt_tokens)]
        if track.prompt_logprobs >= 0 and targets:
            found.append(PromptLogprobRow(index, 0, track.prompt_logprobs, _i32(targets)))
    return found


def _opened(track: Track) -> OpenedRow:
    assert track.rules is not None
    rules = dataclasses.asdict(track.rules)
    return OpenedRow(track.seq_id, track.num_prompt_tokens, _i32(track.tokens), **rules)


def apply_step(tracks: list[Track], num_new: list[int], sampled: bytes) -> None:
    """What the controller does with a result: moves every track on, and gives new tokens to those that sampled."""
    tokens = np.frombuffer(sampled, np.int32).tolist()
    begin = 0
    for track, new in zip(tracks, num_new, strict=True):
        track.computed += new
        if track.computed == len(track.tokens):
            end = begin + 1 + len(track.drafts)
            track.take(tokens_that_count(tokens[begin:end], track.drafts))
            begin = end
    assert begin == len(tokens), "more tokens than rows that sample"


def run_tracks(
    execute: Callable[[StepPlan], StepResult | None],
    tracks: list[Track],
    chunk: int,
    num_tokens: int,
    *,
    propose: Callable[[Track], list[int]] = lambda _: [],
) -> list[list[int]]:
    """Runs all tracks together, at most `chunk` tokens of each per step, until each has made `num_tokens`.

    Args:
        propose: draft tokens for a track that will sample.
    """
    step_id = 0
    while live := [track for track in tracks if len(track.made) < num_tokens]:
        num_new = [min(chunk, len(track.tokens) - track.computed) for track in live]
        for track in live:
            track.drafts = propose(track)[: num_tokens - len(track.made) - 1]
        result = execute(plan_step(step_id, live, num_new))
        assert result is not None
        apply_step(live, num_new, result.sampled)
        step_id += 1
    return [track.made for track in tracks]


def run_tracks_ahead(
    execute: Callable[[StepPlan], StepResult | None], tracks: list[Track], chunk: int, num_tokens: int
) -> list[list[int]]:
    """The same with each step planned before the one before it is executed; without drafts."""
    places: dict[int, int] = {}  # by sequence: the flat position of its token in the step that is planned already
    waiting: tuple[StepPlan, list[Track]] | None = None
    for step_id in itertools.count():
        planned = [
            _view_ahead(track, places) for track in tracks if len(track.made) + (track.seq_id in places) < num_tokens
        ]
        num_new = [min(chunk, len(view.tokens) - view.computed) for view in planned]
        plan = plan_step(step_id, planned, num_new) if planned else None
        by_id = {track.seq_id: track for track in tracks}
        for view, new in zip(planned, num_new, strict=True):
            by_id[view.seq_id].computed += new
        sampling = [
            by_id[v.seq_id] for v, new in zip(planned, num_new, strict=True) if v.computed + new == len(v.tokens)
        ]
        if waiting is not None:
            _finish(execute, *waiting)
        if plan is None:
            break
        places = {track.seq_id: place for place, track in enumerate(sampling)}
        waiting = plan, sampling
    return [track.made for track in tracks]


def _view_ahead(track: Track, places: dict[int, int]) -> Track:
    """The track with what it will sample in the step before as a placeholder."""
    if track.seq_id not in places:
        return dataclasses.replace(track)
    pending = -1 - places[track.seq_id]
    return dataclasses.replace(track, tokens=[*track.tokens, pending], made=[*track.made, pending])


def _finish(execute: Callable[[StepPlan], StepResult | None], plan: StepPlan, sampling: list[Track]) -> None:
    result = execute(plan)
    assert result is not None
    for track, token in zip(sampling, np.frombuffer(result.sampled, np.int32).tolist(), strict=True):
        track.take([token])


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


def lone_runner(path: Path, num_blocks: int, **changes: object) -> ModelRunner:
    """The only rank of a checkpoint, in this process, with its cache. `changes`: settings that differ."""
    runner = load_runner(worker_settings(str(path), **changes), RankGroup(0, 1), PixelArena())
    runner.allocate(num_blocks)
    return runner
