"""The demo model against plain transformers: chat prompts, and questions about pictures.

In float32 all tokens are equal. In bfloat16 those are that rounding cannot turn: the logits of either side are some
0.15 away from the float32 ones, and as far from each other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from airside import LLM, SamplingParams
from airside.cluster.demo_model.exhibits import exhibits
from airside.cluster.model_source import resolve

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Explain what an airport is.",
    "Translate 'good morning' into Spanish.",
    "What comes after Monday?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a haiku about winter.",
    "Who wrote Romeo and Juliet?",
    "What is the largest planet?",
    "What is two plus two?",
    "What do bees make?",
    "Name a country in Africa.",
    "What is the opposite of hot?",
    "How do I boil an egg?",
    "What is photosynthesis?",
    "Who was the first president of the United States?",
    "What is the boiling point of water?",
    "Tell me about dogs.",
    "What is a prime number?",
    "Where do penguins live?",
    "What is the speed of light?",
    "Describe a rainbow.",
    "What is gravity?",
    "What is the currency of Japan?",
    "What is a noun?",
    "Which ocean is the largest?",
    "What is the Great Wall of China?",
]
EQUAL_TOKENS = 16
UNDECIDED_MARGIN = {"float32": 0.001, "bfloat16": 0.26}
"""Of two logits: a choice that is decided by no more than that is up to the order of rounding."""

DECIDED_PART_MIN = {"float32": 0.99, "bfloat16": 0.2}
"""Of the tokens of chats, before the first undecided choice of each."""


@dataclass(frozen=True)
class Reference:
    """Plain transformers, and its chat template."""

    processor: Any
    model: Any
    dtype: str

    def prompt(self, question: str, num_images: int = 0) -> str:
        images = [{"type": "image"}] * num_images
        messages = [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]
        text: str = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    @torch.inference_mode()
    def answer(self, prompt: str, max_tokens: int, pictures: tuple[bytes, ...] = ()) -> Answer:
        images = [[Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]] if pictures else None
        inputs = self.processor(text=prompt, images=images, return_tensors="pt")
        if pictures:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        made = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        top = torch.cat(made.logits).float().topk(2).values
        token_ids = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Answer(token_ids, (top[:, 0] - top[:, 1]).tolist(), UNDECIDED_MARGIN[self.dtype])


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and by how much each choice was decided."""

    token_ids: list[int]
    margins: list[float]
    undecided_margin: float

    @property
    def decided(self) -> list[int]:
        """The tokens before the first choice that rounding may turn."""
        undecided = (i for i, margin in enumerate(self.margins) if margin <= self.undecided_margin)
        return self.token_ids[: next(undecided, len(self.margins))]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return resolve("demo", print)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reference(checkpoint: Path, request: pytest.FixtureRequest) -> Reference:
    dtype = request.param
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    return Reference(AutoProcessor.from_pretrained(checkpoint), model, dtype)


@pytest.fixture(scope="module")
def llm(checkpoint: Path, reference: Reference) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype=reference.dtype) as running:
        yield running


def test_chat_prompts(reference: Reference, llm: LLM) -> None:
    prompts = [reference.prompt(question) for question in QUESTIONS]
    answers = [reference.answer(prompt, EQUAL_TOKENS) for prompt in prompts]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=EQUAL_TOKENS))
    decided = sum(len(answer.decided) for answer in answers)
    assert decided >= DECIDED_PART_MIN[reference.dtype] * sum(len(answer.token_ids) for answer in answers)
    got = [output.token_ids[: len(answer.decided)] for output, answer in zip(outputs, answers, strict=True)]
    assert got == [answer.decided for answer in answers]


def test_pictures(reference: Reference, llm: LLM) -> None:
    shown = exhibits()
    prompts = [reference.prompt(exhibit.question, len(exhibit.pictures)) for exhibit in shown]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = llm.generate(prompts, params, images=[list(exhibit.pictures) for exhibit in shown])
    expected = [reference.answer(prompt, 12, e.pictures) for prompt, e in zip(prompts, shown, strict=True)]
    assert sum(len(answer.decided) == len(answer.token_ids) for answer in expected) >= len(shown) - 4
    got = [output.token_ids[: len(answer.decided)] for output, answer in zip(outputs, expected, strict=True)]
    assert got == [answer.decided for answer in expected]


def test_neighbours_change_nothing(reference: Reference, llm: LLM) -> None:
    prompts = [reference.prompt(question) for question in QUESTIONS[:10]]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    together = llm.generate(prompts, params)
    assert [output.token_ids for output in together] == alone
