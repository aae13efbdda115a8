"""Columns of the engine's Python face, as lists, and requests with the fields that a test does not care for."""

from __future__ import annotations

import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from airside import _core

IMAGE = 7
"""The image token of all tests here."""


def i32(values: Iterable[int]) -> bytes:
    return array.array("i", values).tobytes()


def f32(values: Iterable[float]) -> bytes:
    return array.array("f", values).tobytes()


def ints(column: bytes, code: str = "i") -> list[int]:
    """`code` as in `array`: i for i32, Q for u64, q for i64, B for u8."""
    return array.array(code, column).tolist()


def config(**values: Any) -> _core.EngineConfig:  # Any: whatever the test is about
    """Without what makes a plan depend on earlier ones, unless the test asks for it."""
    defaults: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 48,
        "image_token_id": IMAGE,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    return _core.EngineConfig(**{**defaults, **values})


def request(seq_id: int, tokens: int | list[int], **values: Any) -> _core.Request:  # Any: as above
    """A request; `tokens` alone says how many, and then they are all different from the image token."""
    ids = [100 + i for i in range(tokens)] if isinstance(tokens, int) else tokens
    defaults: dict[str, Any] = {"client": 0, "arrival": 0.0}
    return _core.Request(seq_id=seq_id, token_ids=i32(ids), **{**defaults, **values})


@dataclass
class PlanRow:
    """One row of a plan."""

    seq_id: int
    begin: int
    tokens: list[int]
    blocks: list[int]
    num_sampled: int
    first: int  # of its sampled positions, in the step's
    sampling: int  # index among the rows that sample
    banned: list[list[int]] = field(default_factory=list)  # per sampled position
    position: int | None = None  # in the output, of the first token sampled
    forced: list[int] = field(default_factory=list)
    logprobs: int = -1
    structured: bool = False
    drafts_wanted: int = 0
    state_slot: int | None = None
    state_from: int | None = None
    tail: list[int] = field(default_factory=list)
    position_shift: int = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def drafts(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.num_sampled + 1 :] if self.num_sampled else []


def plan_rows(plan: _core.StepPlan) -> list[PlanRow]:
    """Raises AssertionError when the columns do not fit one another."""
    tokens, tables = iter(ints(plan.token_ids)), iter(ints(plan.block_tables))
    tails, slots, origins = iter(ints(plan.tail_ids)), ints(plan.state_slots), ints(plan.state_from)
    shifts = _filled(ints(plan.position_shifts), plan.num_seqs, 0)
    columns = (
        ints(plan.seq_ids, "Q"),
        ints(plan.num_computed),
        ints(plan.num_new),
        ints(plan.num_blocks),
        ints(plan.sampled, "B"),
    )
    tail_length = len(plan.tail_ids) // 4 // plan.num_seqs
    rows: list[PlanRow] = []
    for seq_id, begin, num_new, num_blocks, sampled in zip(*columns, strict=True):
        row = PlanRow(
            seq_id=seq_id,
            begin=begin,
            tokens=[next(tokens) for _ in range(num_new)],
            blocks=[next(tables) for _ in range(num_blocks)],
            num_sampled=sampled,
            first=sum(row.num_sampled for row in rows),
            sampling=sum(row.num_sampled > 0 for row in rows),
            state_slot=slots[len(rows)] if slots else None,
            state_from=origins[len(rows)] if origins else None,
            tail=[next(tails) for _ in range(tail_length)],
            position_shift=shifts[len(rows)],
        )
        rows.append(row)
    left = [*tokens, *tables, *tails]
    assert not left, f"columns longer than their rows: {left}"
    assert plan.num_seqs == len(rows)
    assert plan.num_tokens == sum(len(row.tokens) for row in rows)
    _read_sampling(plan, rows)
    return rows


def _read_sampling(plan: _core.StepPlan, rows: list[PlanRow]) -> None:
    num_sampling = sum(row.num_sampled > 0 for row in rows)
    num_positions = sum(row.num_sampled for row in rows)
    widths = {"temperature": 4, "top_k": 4, "top_p": 4, "min_p": 4, "seed": 8, "position": 8}
    for name, width in widths.items():
        assert len(getattr(plan, name)) == num_sampling * width, name
    banned = dict(plan.banned)
    positions, forced = ints(plan.position, "q"), _filled(ints(plan.forced), num_positions, -1)
    logprobs = _filled(ints(plan.logprobs), num_sampling, -1)
    structured = _filled(ints(plan.structured, "B"), num_sampling, 0)
    wanted = _filled(ints(plan.drafts_wanted), num_sampling, 0)
    for row in rows:
        if not row.num_sampled:
            continue
        row.position = positions[row.sampling]
        flat = range(row.first, row.first + row.num_sampled)
        row.banned = [banned.pop(position, []) for position in flat]
        row.forced = [forced[position] for position in flat]
        row.logprobs = logprobs[row.sampling]
        row.structured = bool(structured[row.sampling])
        row.drafts_wanted = wanted[row.sampling]
    assert not banned, f"tokens are banned where nothing is sampled: {banned}"


def _filled(column: list[int], length: int, absent: int) -> list[int]:
    assert len(column) in (0, length)
    return column or [absent] * length


def token_rows(output: _core.ClientOutput) -> list[tuple[int, list[int]]]:
    """(seq_id, its new tokens), in order."""
    tokens = ints(output.token_ids)
    rows: list[tuple[int, list[int]]] = []
    for seq_id, count in zip(ints(output.seq_ids, "Q"), ints(output.num_tokens), strict=True):
        rows.append((seq_id, tokens[:count]))
        tokens = tokens[count:]
    assert not tokens
    return rows
