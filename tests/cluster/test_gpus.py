"""Which GPUs count."""

from __future__ import annotations

from pathlib import Path

import pytest

from airside.cluster.gpus import count_gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("1", 1), ("0,2", 2), ("GPU-5f, GPU-6e", 2), ("0,-1,1", 1)],
)
def test_those_that_are_found_and_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    for name in ("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path) == count


def test_there_may_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus(tmp_path / "no-driver") == 0
