"""Held-out questions as a client would send them: files of many sizes, JPEG and PNG, and the prompt's text."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2
import numpy as np
import torch
from PIL import Image

from airside.cluster.demo_model.recipe import ASSETS
from airside.cluster.demo_model.training.drawing import draw, encode
from airside.cluster.demo_model.training.questions import Kind, Question, ask, scenes_for
from airside.cluster.demo_model.training.scans import Scans
from airside.cluster.demo_model.training.world import Random, Scene

JPEG_QUALITY = (60, 95)


@dataclass(frozen=True, slots=True)
class Case:
    """One question about one or two picture files."""

    question: Question
    pictures: tuple[bytes, ...]
    sizes: tuple[tuple[int, int], ...]

    @property
    def prompt(self) -> str:
        """The whole prompt, as the model's chat template writes it."""
        return prompt(self.question.text, len(self.pictures))


def prompt(question: str, num_pictures: int) -> str:
    """A chat's prompt: the pictures' marks, then the text, with the default system message."""
    template = jinja2.Template((ASSETS / "chat_template.jinja").read_text())
    content = [{"type": "image"}] * num_pictures + [{"type": "text", "text": question}]
    text: str = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
    return text


def cases(kind: Kind, number: int, scans: Scans, seed: int) -> list[Case]:
    """The first `number` questions of a kind that this seed makes; digits are scans that were not trained on."""
    random = np.random.default_rng([seed, list(Kind).index(kind)])
    found: list[Case] = []
    while len(found) < number:
        scenes = scenes_for(kind, scans, True, random)
        question = ask(kind, scenes, random)
        if question is not None:
            files = tuple(file(scene, scans, random) for scene in scenes)
            found.append(Case(question, files, tuple((s.width_px, s.height_px) for s in scenes)))
    return found


def file(scene: Scene, scans: Scans, random: Random, suffix: str | None = None) -> bytes:
    """A scene as a PNG or JPEG file of its own size."""
    pixels, _ = draw([scene], scans.ink, scene.height_px, scene.width_px, random)
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).to(torch.uint8).numpy())
    chosen = suffix or ("jpg" if random.random() < 0.5 else "png")
    low, high = JPEG_QUALITY
    return encode(picture, chosen, int(random.integers(low, high + 1)))
