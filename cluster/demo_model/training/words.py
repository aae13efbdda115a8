"""The image tokens say their facts in the text model's own words: along its embeddings, which it knows how to read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from airside.cluster.demo_model.training.facts import NO_COLOUR, NO_DIGIT, NO_SHAPE, PAIRS, SIDES, Facts
from airside.cluster.demo_model.training.packing import Packer
from airside.cluster.demo_model.training.questions import NUMBERS
from airside.cluster.demo_model.training.readouts import COLOUR, OUTERMOST, SHAPE, TOTAL
from airside.cluster.demo_model.training.tower import TOKENS
from airside.cluster.demo_model.training.world import COLOURS, SHAPES

NOTHING = -100  # no such word is right, or it isn't clear which
LEFT, RIGHT = 0, 1


class Words:
    """Groups of words of which each token may have to say one.

    Args:
        packer: knows the tokenizer.
        embedding: the text model's, [vocabulary, 576].
    """

    def __init__(self, packer: Packer, embedding: Tensor) -> None:
        groups = {
            "digit": [str(digit) for digit in range(NO_DIGIT)],
            "number": list(NUMBERS),
            "colour": [f" {colour}" for colour in COLOURS],
            "answered colour": [colour.capitalize() for colour in COLOURS],
            "shape": [f" {shape}" for shape in SHAPES],
            "side": [" left", " right"],
            "answered side": ["Left", "Right"],
            "shapes": [" shapes", " circles", " squares", " triangles"],
        }
        self._vectors = {
            name: embedding[torch.tensor([packer.encode(word)[0] for word in words])].float()
            for name, words in groups.items()
        }

    def loss(self, tokens: Tensor, true: Facts) -> Tensor:
        """Mean cross entropy of saying the right word of each group. tokens: [n, 16, 576]."""
        losses = []
        for group, words in said(true).items():
            logits = tokens @ self._vectors[group].T
            known = words != NOTHING
            if known.any():
                losses.append(functional.cross_entropy(logits[known], words[known]))
        return torch.stack(losses).mean()

    def target(self, true: Facts) -> Tensor:
        """What tokens of nothing but their words would be: [n, 16, 576]."""
        total = torch.zeros(())
        for group, words in said(true).items():
            vectors = self._vectors[group]
            total = total + torch.cat((vectors, torch.zeros_like(vectors[:1])))[words.clamp_min(-1)]
        return total


def said(true: Facts) -> dict[str, Tensor]:
    """By group of words: which of it each token says, [n, 16], or `NOTHING`."""
    number = len(true.digit)
    things = true.digit == NO_DIGIT
    out = {
        name: torch.full((number, TOKENS), NOTHING)
        for name in ("digit", "number", "colour", "answered colour", "shape", "side", "answered side", "shapes")
    }
    out["digit"][~things] = true.digit[~things][:, None]
    for token in TOTAL:
        out["number"][:, token] = true.total
        out["shapes"][:, token] = 0
    for i, token in enumerate(OUTERMOST):
        out["side"][:, token] = i
        out["colour"][:, token] = _known(true.outermost[:, i, 0], NO_COLOUR)
        out["shape"][:, token] = _known(true.outermost[:, i, 1], NO_SHAPE)
    for colour, token in enumerate(COLOUR):
        counts = true.kinds[:, colour]
        out["colour"][:, token] = colour
        alone = (counts > 0).sum(1) == 1
        out["shape"][:, token] = torch.where(alone, counts.argmax(1), NOTHING)
        out["number"][:, token] = torch.where((counts > 0).sum(1) <= 1, counts.sum(1), NOTHING)
    for shape, token in enumerate(SHAPE):
        out["shape"][:, token] = shape
        out["shapes"][:, token] = 1 + shape
        out["number"][:, token] = true.kinds[:, :, shape].sum(1)
        out["answered colour"][:, token] = _known(true.only[:, shape], NO_COLOUR)
        out["answered side"][:, token] = _side(true, shape)
    for name in out:
        if name != "digit":
            out[name][~things] = NOTHING
    return out


def _known(words: Tensor, unknown: int) -> Tensor:
    return torch.where(words == unknown, NOTHING, words)


def _side(true: Facts, shape: int) -> Tensor:
    """Left or right for a thing that is alone of its shape and clearly on that side of all others such."""
    lefts = torch.zeros(len(true.digit), dtype=torch.long)
    rights = torch.zeros_like(lefts)
    for i, (first, second) in enumerate(PAIRS):
        if shape in (first, second):
            side = true.sides[:, i]
            swapped = shape == second
            lefts += side == SIDES.index("right" if swapped else "left")
            rights += side == SIDES.index("left" if swapped else "right")
    out = torch.full_like(lefts, NOTHING)
    out[(lefts > 0) & (rights == 0)] = LEFT
    out[(rights > 0) & (lefts == 0)] = RIGHT
    return out
