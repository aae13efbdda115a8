"""Reading slices of safetensors checkpoints, and saying what is wrong with broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from airside.workers.load import load_runner
from airside.workers.model_config import CheckpointError, TensorParallelSizeError
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from airside.workers.weights import safetensors_file
from airside.workers.weights.safetensors_files import SafetensorsFiles
from tests.workers.step_plans import worker_settings

CPU = torch.device("cpu")
QUERY = "model.layers.1.self_attn.q_proj.weight"


def load(path: Path, **changes: object) -> None:
    settings = worker_settings(str(path), **changes)
    load_runner(settings, RankGroup(settings.rank, settings.world_size), PixelArena())


@pytest.fixture
def copy_of_llama(llama_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_path, tmp_path / "copy"))


def test_slices_of_a_sharded_checkpoint(untied_llama_path: Path) -> None:
    assert len(list(untied_llama_path.glob("*.safetensors"))) > 2
    index = json.loads((untied_llama_path / "model.safetensors.index.json").read_text())
    whole = load_file(untied_llama_path / index["weight_map"][QUERY])[QUERY]
    files = SafetensorsFiles(untied_llama_path, torch.bfloat16, CPU)
    rows = files.read(QUERY, (128, 128), rows=slice(64, 128))
    columns = files.read(QUERY, (128, 128), columns=slice(32, 48))
    assert torch.equal(rows, whole[64:].bfloat16())
    assert torch.equal(columns, whole[:, 32:48].bfloat16())
    assert columns.is_contiguous()


def test_a_missing_tensor_is_named_with_its_file(copy_of_llama: Path) -> None:
    file = copy_of_llama / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != QUERY}, file)
    with pytest.raises(CheckpointError, match=rf"tensor {QUERY} is missing in .*copy/model\.safetensors"):
        load(copy_of_llama)


def test_a_tensor_of_another_shape_is_named(copy_of_llama: Path) -> None:
    file = copy_of_llama / "model.safetensors"
    save_file({**load_file(file), QUERY: torch.zeros(64, 128)}, file)
    with pytest.raises(CheckpointError, match=rf"{QUERY} in .* has shape \[64, 128\], the config says \[128, 128\]"):
        load(copy_of_llama)


def test_a_truncated_file_is_named(copy_of_llama: Path) -> None:
    file = copy_of_llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"copy/model\.safetensors cannot be read"):
        load(copy_of_llama)


def test_a_missing_file_of_the_index_is_named(untied_llama_path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(untied_llama_path, tmp_path / "copy"))
    victim = sorted(copy.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load(copy)


def test_a_folder_without_weights_is_refused(copy_of_llama: Path) -> None:
    (copy_of_llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        load(copy_of_llama)


def test_a_size_that_does_not_divide_is_refused_before_loading(copy_of_llama: Path) -> None:
    (copy_of_llama / "model.safetensors").unlink()
    with pytest.raises(TensorParallelSizeError, match="sizes that work: 1, 2"):
        load(copy_of_llama, world_size=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_every_slice_is_what_the_format_s_own_library_reads(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_READ_BYTES", 100)  # several reads for what is copied
    tensors = {
        "matrix": (torch.randn(40, 24) * 9).to(dtype),
        "vector": (torch.randn(7) * 9).to(dtype),
        "scalar": torch.tensor(5).to(dtype),
        "cube": (torch.randn(3, 4, 5) * 9).to(dtype),
        "nothing": torch.empty(0, 3).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for wanted in (dtype, torch.float32):
        files = SafetensorsFiles(tmp_path, wanted, CPU)
        for name, tensor in tensors.items():
            assert torch.equal(files.read(name, tuple(tensor.shape)), tensor.to(wanted))
        whole = tensors["matrix"].to(wanted)
        for rows in (slice(None), slice(3, 9), slice(39, None), slice(4, 4)):
            assert torch.equal(files.read("matrix", (40, 24), rows), whole[rows])
            assert torch.equal(files.table("matrix", (40, 24), rows), whole[rows])
            for columns in (slice(0, 5), slice(20, None)):
                assert torch.equal(files.read("matrix", (40, 24), rows, columns), whole[rows, columns])


def test_a_table_stays_in_the_file_and_shares_no_writes(tmp_path: Path) -> None:
    tensor = torch.arange(4096 * 8, dtype=torch.float32).view(4096, 8)
    save_file({"x": torch.ones(3), "table": tensor}, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path, torch.float32, CPU)
    table = files.table("table", (4096, 8), slice(1000, 2000))
    assert "model.safetensors" in Path("/proc/self/maps").read_text()
    assert torch.equal(table, tensor[1000:2000])
    del files
    table[0] = 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["table"], tensor)


def damaged(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Writes the file with another header of the same length of values."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[QUERY].update(data_offsets=[0, 2**40]),
        lambda header: header[QUERY].update(data_offsets=[-8, 128 * 128 * 4 - 8]),
        lambda header: header[QUERY].update(shape=[1, 128]),
        lambda header: header[QUERY].update(shape="128"),
        lambda header: header[QUERY].update(dtype="F4"),
        lambda header: header[QUERY].pop("dtype"),
        lambda header: header.update({QUERY: 5}),
    ],
)
def test_an_odd_header_is_named(copy_of_llama: Path, change: Callable[[dict[str, Any]], object]) -> None:
    damaged(copy_of_llama / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=r"copy/model\.safetensors cannot be read"):
        load(copy_of_llama)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]"])
def test_what_is_no_such_file_is_named(copy_of_llama: Path, content: bytes) -> None:
    (copy_of_llama / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"copy/model\.safetensors cannot be read"):
        load(copy_of_llama)


def test_a_file_that_becomes_shorter_is_named(copy_of_llama: Path) -> None:
    files = SafetensorsFiles(copy_of_llama, torch.float32, CPU)
    with (copy_of_llama / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    last = max(files._handle("model.safetensors").tensors.items(), key=lambda item: item[1].begin)
    with pytest.raises(CheckpointError, match="it ends in the middle of a tensor"):
        files.read(last[0], last[1].shape)
