"""Packed weights from disk: the same to the bit, or made again."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from airside.workers.linear import PackedLinear
from airside.workers.load import load_runner
from airside.workers.model_config import load_model_config
from airside.workers.models.registry import load_model
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from airside.workers.weights import packed_cache
from airside.workers.weights.cached_weights import CachedWeights
from airside.workers.weights.load_times import LoadTimes
from airside.workers.weights.open_weights import open_weights
from airside.workers.weights.packed_cache import PackedCache
from tests.workers.step_plans import worker_settings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)


@pytest.fixture
def checkpoint(llama_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_path, tmp_path / "llama"))


@dataclass
class Loaded:
    """The packed weights of one load, in the order of asking, and how many of them the cache had."""

    weights: list[torch.Tensor]
    num_found: int
    cache: PackedCache


def load(path: Path, folder: Path, rank: int = 0, size: int = 1, quantization: str = "none") -> Loaded:
    """A whole model through the cache, and the file written if it is to be."""
    cache = PackedCache(folder, path, {"quantization": quantization, "rank": rank, "world_size": size})
    source = CachedWeights(open_weights(path, torch.bfloat16, CPU, quantization), cache, LoadTimes())
    weights: list[torch.Tensor] = []
    linear = source.linear

    def noted(*arguments: object) -> object:
        made = linear(*arguments)  # type: ignore[arg-type]
        assert isinstance(made, PackedLinear)
        weights.append(made.weight.data)
        return made

    source.linear = noted  # type: ignore[method-assign, assignment]
    load_model(load_model_config(path), source, RankGroup(rank, size), 64)
    thread = cache.close()
    if thread is not None:
        thread.join(20)
        assert not thread.is_alive()
    return Loaded(weights, cache.num_found, cache)


def assert_same(one: Loaded, other: Loaded) -> None:
    assert len(one.weights) == len(other.weights) > 8
    for weight, again in zip(one.weights, other.weights, strict=True):
        assert torch.equal(weight, again)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_second_start_has_the_same_bits(checkpoint: Path, tmp_path: Path, quantization: str) -> None:
    first = load(checkpoint, tmp_path / "cache", quantization=quantization)
    again = load(checkpoint, tmp_path / "cache", quantization=quantization)
    assert (first.num_found, again.num_found) == (0, len(first.weights))
    assert_same(first, again)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.cache.path.name]


def test_what_is_found_is_what_is_in_the_file(checkpoint: Path, tmp_path: Path) -> None:
    """The second start would not notice other weights of the checkpoint: it does not look at them."""
    first = load(checkpoint, tmp_path)
    before = (checkpoint / "model.safetensors").stat()
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-4000:] = bytes(4000)
    (checkpoint / "model.safetensors").write_bytes(content)
    os.utime(checkpoint / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_same(first, load(checkpoint, tmp_path))


def test_each_rank_has_a_file_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = [load(checkpoint, folder, rank, 2) for rank in range(2)]
    again = [load(checkpoint, folder, rank, 2) for rank in range(2)]
    assert [loaded.num_found for loaded in again] == [len(loaded.weights) for loaded in first]
    for loaded, twice in zip(first, again, strict=True):
        assert_same(loaded, twice)
    assert not torch.equal(first[0].weights[0], first[1].weights[0])
    assert len(list(folder.iterdir())) == 2
    assert load(checkpoint, folder).num_found == 0  # nothing of these is the whole


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5000] ^= 4
    path.write_bytes(content)


def flip_a_bit_of_the_first(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[packed_cache._ALIGNMENT * 2] ^= 4
    path.write_bytes(content)


def break_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"made_of"', b'"made_up"'))


def break_the_table(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'["bfloat16", ', b'["bfloat61", '))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.parametrize(
    "damage",
    [cut, cut_to_nothing, flip_a_bit, flip_a_bit_of_the_first, break_the_header, break_the_table, lengthen],
)
def test_a_damaged_file_is_made_again(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = load(checkpoint, tmp_path)
    damage(first.cache.path)
    again = load(checkpoint, tmp_path)
    assert again.num_found < len(first.weights)
    assert_same(first, again)
    assert caplog.text.count("are not used") == 1
    third = load(checkpoint, tmp_path)
    assert third.num_found == len(first.weights)
    assert_same(first, third)


def touch(path: Path) -> None:
    os.utime(path / "model.safetensors", ns=(0, 1))


def edit_config(path: Path) -> None:
    (path / "config.json").write_text((path / "config.json").read_text() + " ")


@pytest.mark.parametrize("change", [touch, edit_config])
def test_a_checkpoint_that_changed_is_packed_again(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    load(checkpoint, tmp_path)
    change(checkpoint)
    assert load(checkpoint, tmp_path).num_found == 0
    assert "another state of the checkpoint" in caplog.text
    assert load(checkpoint, tmp_path).num_found > 0


def test_another_layout_is_packed_again(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(checkpoint, tmp_path)
    monkeypatch.setattr("airside.workers.ops.weight_layout", lambda: -1)
    assert load(checkpoint, tmp_path).num_found == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_takes_nothing_is_no_error(
    checkpoint: Path, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    real = Path.open

    def refusing(path: Path, mode: str = "r", *rest: object, **values: object) -> object:
        file = real(path, mode, *rest, **values)  # type: ignore[arg-type]
        if mode == "wb" and ".partial-" in path.name:
            file.close()
            raise OSError(code, os.strerror(code))
        return file

    monkeypatch.setattr(Path, "open", refusing)
    loaded = load(checkpoint, tmp_path / "cache")
    assert len(loaded.weights) > 8
    assert "packed weights are not kept in" in caplog.text
    assert os.strerror(code) in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_place_that_is_no_folder_is_no_error(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert load(checkpoint, tmp_path / "cache").num_found == 0
    assert load(checkpoint, tmp_path / "cache").num_found == 0


def test_a_disk_that_would_be_full_is_left_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    values = list(real)
    values[4] = 1  # blocks for anybody
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    load(checkpoint, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_small_models_are_not_kept(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 32 << 20)
    load(checkpoint, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_files_of_checkpoints_that_are_gone_are_removed(checkpoint: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    folder = tmp_path / "cache"
    load(other, folder)
    shutil.rmtree(other)
    (folder / ".partial-old-1").write_text("")
    os.utime(folder / ".partial-old-1", (0, time.time() - 7200))
    (folder / ".partial-new-1").write_text("")
    (folder / "odd.packed").write_text("no header")
    kept = load(checkpoint, folder).cache.path.name
    assert sorted(path.name for path in folder.iterdir()) == sorted([".partial-new-1", "odd.packed", kept])


def test_a_rank_uses_it_where_it_is_told_to(checkpoint: Path, tmp_path: Path) -> None:
    def times(**changes: object) -> dict[str, float]:
        taken = LoadTimes()
        load_runner(worker_settings(str(checkpoint), **changes), RankGroup(0, 1), PixelArena(), taken)
        return taken.seconds

    assert {"read", "pack"} <= times().keys()
    assert not list(tmp_path.glob("**/*.packed"))
    folder = tmp_path / "cache"
    assert "pack" in times(packed_cache=str(folder))
    deadline = time.monotonic() + 20
    while not list(folder.glob("*.packed")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "pack" not in times(packed_cache=str(folder))
