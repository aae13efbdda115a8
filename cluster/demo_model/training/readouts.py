"""Throw-away read-outs: they make the tower's patches and tokens say facts, and are not part of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from airside.cluster.demo_model.training.facts import NO_DIGIT, PAIRS, SIDES, Facts
from airside.cluster.demo_model.training.tower import HIDDEN, TEXT_HIDDEN, Seen
from airside.cluster.demo_model.training.world import COLOURS, SHAPES, THINGS_MAX

COUNTS = THINGS_MAX + 1
# Which of the sixteen image tokens says what; all of them say the digit.
TOTAL = (0, 3)
OUTERMOST = (1, 2)
COLOUR = (4, 5, 6, 7, 9, 10)
SIDE = (8, 11)
SHAPE = (12, 13, 14)


class Readouts(nn.Module):
    """Linear maps from tokens and patches to facts."""

    def __init__(self) -> None:
        super().__init__()
        kinds, colours, shapes = len(COLOURS) * len(SHAPES), len(COLOURS) + 1, len(SHAPES) + 1
        self.centre = nn.Linear(HIDDEN, 1 + kinds)
        self.cover = nn.Linear(HIDDEN, colours)
        self.ink = nn.Linear(HIDDEN, 16)
        self.patch_digit = nn.Linear(HIDDEN, NO_DIGIT + 1)
        self.patch_total = nn.Linear(HIDDEN, COUNTS)
        self.digit = nn.Linear(TEXT_HIDDEN, NO_DIGIT + 1)
        self.scan = nn.Linear(TEXT_HIDDEN, 64)
        self.total = nn.Linear(TEXT_HIDDEN, COUNTS)
        self.outermost = nn.ModuleList([nn.Linear(TEXT_HIDDEN, colours + shapes) for _ in OUTERMOST])
        self.kinds = nn.ModuleList([nn.Linear(TEXT_HIDDEN, len(SHAPES) * COUNTS) for _ in COLOUR])
        self.sides = nn.Linear(TEXT_HIDDEN, len(PAIRS) * len(SIDES))
        self.shapes = nn.ModuleList([nn.Linear(TEXT_HIDDEN, COUNTS + colours) for _ in SHAPE])

    def losses(self, seen: Seen, true: Facts, ink: Tensor, scan: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The losses by name, and of each fact how often it is right.

        Args:
            ink: [n, 64, 16], coverage in a 4x4 grid of each patch, for the pictures of digits.
            scan: [n, 64], the digits' upright scans.
        """
        losses: dict[str, Tensor] = {}
        right: dict[str, Tensor] = {}
        tokens = functional.rms_norm(seen.tokens, (TEXT_HIDDEN,))
        early, late = (functional.layer_norm(x, (HIDDEN,)) for x in (seen.early, seen.late))
        digits, things = true.digit != NO_DIGIT, true.digit == NO_DIGIT
        self._patches(losses, right, early, true)
        losses["patch digit"] = _entropy(self.patch_digit(late), true.digit[:, None].expand(-1, late.shape[1]))
        losses["digit"] = _entropy(self.digit(tokens), true.digit[:, None].expand(-1, tokens.shape[1]))
        if digits.any():
            losses["ink"] = 10 * functional.mse_loss(self.ink(early[digits]), ink[digits])
            losses["scan"] = 6 * functional.mse_loss(self.scan(tokens[digits]).mean(1), scan[digits])
            said = self.digit(tokens[digits]).mean(1).argmax(-1)
            right["digit"] = (said == true.digit[digits]).float().mean()
        if things.any():
            total = true.total[things][:, None].expand(-1, late.shape[1])
            losses["patch total"] = 0.5 * _entropy(self.patch_total(late[things]), total)
            self._tokens(losses, right, tokens[things], true, things)
        return losses, right

    def _patches(self, losses: dict[str, Tensor], right: dict[str, Tensor], early: Tensor, true: Facts) -> None:
        weight = torch.ones(self.centre.out_features)
        weight[1:] = 8.0
        centre = self.centre(early)
        losses["centre"] = functional.cross_entropy(centre.flatten(0, 1), true.centre.flatten(), weight)
        losses["cover"] = _entropy(self.cover(early), true.cover)
        with_thing = true.centre > 0
        if with_thing.any():
            right["centre"] = (centre[with_thing].argmax(-1) == true.centre[with_thing]).float().mean()

    def _tokens(
        self, losses: dict[str, Tensor], right: dict[str, Tensor], tokens: Tensor, true: Facts, things: Tensor
    ) -> None:
        for token in TOTAL:
            _say(losses, right, "total", self.total(tokens[:, token]), true.total[things])
        for i, token in enumerate(OUTERMOST):
            colour, shape = self.outermost[i](tokens[:, token]).split((len(COLOURS) + 1, len(SHAPES) + 1), -1)
            _say(losses, right, "outer colour", colour, true.outermost[things, i, 0])
            _say(losses, right, "outer shape", shape, true.outermost[things, i, 1])
        kinds = torch.stack([read(tokens[:, t]) for read, t in zip(self.kinds, COLOUR, strict=True)], 1)
        kinds = torch.unflatten(kinds, -1, (len(SHAPES), COUNTS))
        weight = torch.tensor([0.3] + [2.0] * THINGS_MAX)
        losses["kinds"] = 2 * functional.cross_entropy(kinds.flatten(0, 2), true.kinds[things].flatten(), weight)
        right["kinds"] = (kinds.argmax(-1) == true.kinds[things]).flatten(1).all(1).float().mean()
        for token in SIDE:
            sides = torch.unflatten(self.sides(tokens[:, token]), -1, (len(PAIRS), len(SIDES)))
            losses[f"sides {token}"] = 0.75 * _entropy(sides, true.sides[things])
            known = true.sides[things] < 2
            right["sides"] = (sides.argmax(-1) == true.sides[things])[known].float().mean()
        counts = true.kinds[things].sum(1)
        for i, token in enumerate(SHAPE):
            count, colour = self.shapes[i](tokens[:, token]).split((COUNTS, len(COLOURS) + 1), -1)
            _say(losses, right, "shape count", count, counts[:, i])
            _say(losses, right, "colour", colour, true.only[things, i])


def _entropy(said: Tensor, true: Tensor) -> Tensor:
    return functional.cross_entropy(said.flatten(0, -2), true.flatten())


def _say(losses: dict[str, Tensor], right: dict[str, Tensor], name: str, said: Tensor, true: Tensor) -> None:
    """Adds to the losses and the share of right ones of one fact that several tokens say."""
    losses[name] = losses.get(name, torch.zeros(())) + functional.cross_entropy(said, true) / 2
    share = (said.argmax(-1) == true).float().mean()
    right[name] = share if name not in right else (right[name] + share) / 2
