"""Reading slices of safetensors checkpoints, and saying what is wrong with broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from airside.workers.load import load_runner
from airside.workers.model_config import CheckpointError, TensorParallelSizeError
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
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
