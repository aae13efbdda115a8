"""The handwritten digits: 1,797 real scans that come with scikit-learn; every fifth is held out of the training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Scans:
    """`ink`: [number, 8, 8] from 0 to 1; `values`: the digit of each."""

    ink: Tensor
    values: list[int]

    def numbers(self, held_out: bool) -> list[int]:
        """Which scans may be trained on, or which may be asked about."""
        return [i for i in range(len(self.values)) if (i % HELD_OUT_EVERY == 0) == held_out]


def load_scans() -> Scans:
    """Needs scikit-learn, which nothing else of Airside does."""
    from sklearn.datasets import load_digits

    pixels, values = load_digits(return_X_y=True)
    return Scans(torch.from_numpy(pixels).float().view(-1, 8, 8) / 16, [int(value) for value in values])
