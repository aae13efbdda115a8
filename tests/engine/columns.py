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


def ints(column: bytes, code: str = "i") -> list[int]:
    """`code` as in `array`: i for i32, Q for u64, q for i64, B for u8."""
    return array.array(code, column).tolist()


def config(**values: Any) -> _core.EngineConfig:  # Any: whatever the test is about
    defaults: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 48,
        "image_token_id": IMAGE,
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
    sampled: bool
    banned: list[int] = field(default_factory=list)
    position: int | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


def plan_rows(plan: _core.StepPlan) -> list[PlanRow]:
    tokens, tables = iter(ints(plan.token_ids)), iter(ints(plan.block_tables))
    positions = iter(ints(plan.position, "q"))
    banned = dict(plan.banned)
    columns = (
        ints(plan.seq_ids, "Q"),
        ints(plan.num_computed),
        ints(plan.num_new),
        ints(plan.num_blocks),
        ints(plan.sampled, "B"),
    )
    rows: list[PlanRow] = []
    num_sampled = 0
    for seq_id, begin, num_new, num_blocks, sampled in zip(*columns, strict=True):
        row = PlanRow(
            seq_id=seq_id,
            begin=begin,
            tokens=[next(tokens) for _ in range(num_new)],
            blocks=[next(tables) for _ in range(num_blocks)],
            sampled=bool(sampled),
        )
        if row.sampled:
            row.banned = banned.pop(num_sampled, [])
            row.position = next(positions)
            num_sampled += 1
        rows.append(row)
    left = [*tokens, *tables, *positions, *banned]
    assert not left, f"columns longer than their rows: {left}"
    for column, width in ((plan.temperature, 4), (plan.top_k, 4), (plan.top_p, 4), (plan.min_p, 4), (plan.seed, 8)):
        assert len(column) == num_sampled * width
    assert plan.num_seqs == len(rows)
    assert plan.num_tokens == sum(len(row.tokens) for row in rows)
    return rows


def token_rows(output: _core.ClientOutput) -> list[tuple[int, list[int]]]:
    """(seq_id, its new tokens), in order."""
    tokens = ints(output.token_ids)
    rows: list[tuple[int, list[int]]] = []
    for seq_id, count in zip(ints(output.seq_ids, "Q"), ints(output.num_tokens), strict=True):
        rows.append((seq_id, tokens[:count]))
        tokens = tokens[count:]
    assert not tokens
    return rows
