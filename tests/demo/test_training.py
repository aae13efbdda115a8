"""The training runs from end to end, a few steps of it, and what it computes is what the checkpoint computes."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor

from airside.cluster.demo_model.recipe import ASSETS, TEXT_ADAPTER, VISION_WEIGHTS
from airside.cluster.demo_model.training.drawing import as_received
from airside.cluster.demo_model.training.exam import cases
from airside.cluster.demo_model.training.packing import IMAGE, SYSTEMS, Group, Packer
from airside.cluster.demo_model.training.questions import Kind
from airside.cluster.demo_model.training.scans import load_scans
from airside.cluster.demo_model.training.text_model import HIDDEN, TextModel
from airside.cluster.demo_model.training.tower import Tower

pytestmark = pytest.mark.slow


@pytest.fixture
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_both_stages_run_and_write_the_two_files(built_demo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "airside.cluster.demo_model.training", "--quick", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--base", str(built_demo)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in (VISION_WEIGHTS, TEXT_ADAPTER):
        made, shipped = load_file(tmp_path / name), load_file(ASSETS / name)
        assert {key: tensor.shape for key, tensor in made.items()} == {k: tensor.shape for k, tensor in shipped.items()}
        assert all(tensor.dtype == torch.bfloat16 for tensor in made.values())
    assert "answers 2" in (tmp_path / "log.txt").read_text()


def test_shipped_weights_are_small_enough() -> None:
    assert sum((ASSETS / name).stat().st_size for name in (VISION_WEIGHTS, TEXT_ADAPTER)) <= 12_000_000


@torch.inference_mode()
@pytest.mark.parametrize("kind", [Kind.TOTAL, Kind.TWO_DIGITS])
@pytest.mark.usefixtures("eager")
def test_training_sees_what_the_processor_and_the_checkpoint_make_of_it(built_demo: Path, kind: Kind) -> None:
    processor = AutoProcessor.from_pretrained(built_demo)
    reference = AutoModelForImageTextToText.from_pretrained(built_demo, dtype=torch.float32).eval()
    tower, model = Tower.from_file(ASSETS / VISION_WEIGHTS), TextModel(built_demo)
    packer = Packer(Tokenizer.from_file(str(built_demo / "tokenizer.json")))
    prompt = packer.prompt(SYSTEMS[0])
    for case in cases(kind, 3, load_scans(), seed=11):
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in case.pictures]
        text = f"{case.prompt}{case.question.answer}"
        inputs = processor(text=text, images=images, return_tensors="pt")
        rows = packer.pack([Group(tuple(range(len(images))), (case.question,))], len(prompt))
        length = inputs["input_ids"].shape[1] - len(prompt)
        assert inputs["input_ids"][0].tolist() == prompt + rows.ids[0, :length].tolist()
        tokens = tower(inputs["pixel_values"][0]).tokens
        embedded = model.embedding[rows.ids].clone()
        embedded[rows.ids == IMAGE] = tokens.reshape(-1, HIDDEN).bfloat16()
        hidden = model(embedded, rows.positions, rows.visible, prompt, None)
        answering = rows.targets[0, :length] >= 0
        ours = model.logits(hidden)[0, :length][answering].softmax(-1)
        theirs = reference(**inputs).logits[0, len(prompt) :][answering].softmax(-1)
        assert float((ours - theirs).abs().sum(-1).max()) < 0.25  # bfloat16 against float32


def test_pictures_are_shrunk_as_the_processor_shrinks_them(built_demo: Path) -> None:
    processor = AutoProcessor.from_pretrained(built_demo).image_processor
    [case] = cases(Kind.SIDE, 1, load_scans(), seed=3)
    picture = Image.open(io.BytesIO(case.pictures[0])).convert("RGB")
    received = processor(images=[[picture]], return_tensors="pt")["pixel_values"][0, 0]
    ours = picture.resize((128, 128), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.asarray(ours).copy()).permute(2, 0, 1).float() / 127.5 - 1
    assert float((received - pixels).abs().mean()) < 0.02
    assert as_received.__module__ == "airside.cluster.demo_model.training.drawing"
