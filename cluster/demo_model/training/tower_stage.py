"""Stage 1: the tower and connector alone learn to see, fresh pictures every step, told by throw-away read-outs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from airside.cluster.demo_model.training.drawing import MODEL_PX, as_received, draw
from airside.cluster.demo_model.training.facts import facts
from airside.cluster.demo_model.training.readouts import Readouts
from airside.cluster.demo_model.training.scans import Scans
from airside.cluster.demo_model.training.tower import GRID, Tower
from airside.cluster.demo_model.training.world import Random, Scene, digit_scene, things_scene

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TowerSettings:
    """How stage 1 trains."""

    minutes: float
    things_per_step: int = 56
    digits_per_step: int = 40
    learning_rate: float = 1e-3
    warmup_steps: int = 60
    log_steps: int = 50
    steps_max: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Drawn scenes: `pixels` [n, 3, 128, 128] from -1 to 1, `ink` [n, 64, 16], `scan` [n, 64]."""

    scenes: list[Scene]
    pixels: Tensor
    ink: Tensor
    scan: Tensor


def drawn(scenes: list[Scene], scans: Scans, random: Random) -> Batch:
    """Draws scenes as the model will receive them."""
    pixels, ink = draw(scenes, scans.ink, MODEL_PX, MODEL_PX, random)
    cell = MODEL_PX // GRID // 4
    cells = functional.avg_pool2d(ink[:, None], cell).view(-1, GRID, 4, GRID, 4).permute(0, 1, 3, 2, 4)
    scan = torch.stack([scans.ink[s.digit.scan].flatten() if s.digit else torch.zeros(64) for s in scenes])
    return Batch(scenes, as_received(pixels, scenes, random), cells.reshape(-1, GRID * GRID, 16), scan)


def some_digits(number: int, scans: Scans, held_out: bool, random: Random) -> list[Scene]:
    """Scenes of one digit each."""
    chosen = random.choice(scans.numbers(held_out), number)
    return [digit_scene(random, int(scan), scans.values[scan]) for scan in chosen]


def train_tower(
    tower: Tower,
    readouts: Readouts,
    scans: Scans,
    settings: TowerSettings,
    random: Random,
    log: Log,
    save: Callable[[], None],
) -> None:
    """Trains both in place until the time is up; calls `save` now and then."""
    trained = [*tower.parameters(), *readouts.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.02},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
    )
    start, step = time.monotonic(), 0
    tally = Tally()
    while True:
        done = (time.monotonic() - start) / (60 * settings.minutes)
        if done >= 1 or step == settings.steps_max:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate(done, step, settings.warmup_steps)
        scenes = [things_scene(random) for _ in range(settings.things_per_step)]
        batch = drawn(scenes + some_digits(settings.digits_per_step, scans, False, random), scans, random)
        losses, right = readouts.losses(tower(batch.pixels), facts(batch.scenes), batch.ink, batch.scan)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(torch.stack(list(losses.values())).sum())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        tally.add(losses, right)
        if step % settings.log_steps == 0:
            log(f"tower {step} {time.monotonic() - start:.0f}s {tally.told()}")
            tally = Tally()
        if step % (settings.log_steps * 5) == 0:
            log(f"tower held out: {held_out_score(tower, readouts, scans)}")
            save()
    save()


def rate(done: float, step: int, warmup_steps: int) -> float:
    """The share of the learning rate: linear warmup, then half a cosine down to a fiftieth."""
    return min(1.0, (step + 1) / warmup_steps) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, done)))


@torch.no_grad()
def held_out_score(tower: Tower, readouts: Readouts, scans: Scans, number: int = 96 * 5) -> str:
    """How often the read-outs are right about pictures that were not trained on."""
    random = np.random.default_rng(99)
    tally = Tally()
    for _ in range(number // 96):
        scenes = [things_scene(random) for _ in range(56)] + some_digits(40, scans, True, random)
        batch = drawn(scenes, scans, random)
        tally.add(*readouts.losses(tower(batch.pixels), facts(scenes), batch.ink, batch.scan))
    return tally.told()


class Tally:
    """Means of losses and of shares that were right."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, losses: dict[str, Tensor], right: dict[str, Tensor]) -> None:
        """Takes one step's."""
        self._sums.setdefault("loss", []).append(sum(float(loss.detach()) for loss in losses.values()))
        for name, share in right.items():
            if not share.isnan():  # no picture of the batch had such a fact
                self._sums.setdefault(name, []).append(float(share))

    def told(self) -> str:
        """For a log line."""
        return ", ".join(f"{name} {np.mean(values):.3f}" for name, values in self._sums.items())
