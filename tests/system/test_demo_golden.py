"""The demo model in bfloat16 against plain transformers: chat prompts, and handwritten digits."""

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
from airside.cluster.demo_model.digits import digit_pictures
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
]
EQUAL_TOKENS = 16


@dataclass(frozen=True)
class Reference:
    """Plain transformers, and its chat template."""

    processor: Any
    model: Any

    def prompt(self, question: str, with_image: bool = False) -> str:
        image = [{"type": "image"}] if with_image else []
        messages = [{"role": "user", "content": [*image, {"type": "text", "text": question}]}]
        text: str = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    @torch.inference_mode()
    def answer(self, prompt: str, max_tokens: int, picture: bytes | None = None) -> list[int]:
        images = None if picture is None else [[Image.open(io.BytesIO(picture)).convert("RGB")]]
        inputs = self.processor(text=prompt, images=images, return_tensors="pt")
        if picture is not None:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        made = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        ids: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
        return ids


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return resolve("demo", print)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    return Reference(AutoProcessor.from_pretrained(checkpoint), model)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint)) as running:
        yield running


def test_chat_prompts(reference: Reference, llm: LLM) -> None:
    prompts = [reference.prompt(question) for question in QUESTIONS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=EQUAL_TOKENS))
    expected = [reference.answer(prompt, EQUAL_TOKENS) for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected


def test_digits(reference: Reference, llm: LLM) -> None:
    digits = digit_pictures()
    assert len(digits) == 20
    prompt = reference.prompt("What digit is this?", with_image=True)
    pictures = [digit.data for digit in digits]
    params = SamplingParams(temperature=0.0, max_tokens=28)
    outputs = llm.generate([prompt] * len(pictures), params, images=[[picture] for picture in pictures])
    expected = [reference.answer(prompt, 28, picture) for picture in pictures]
    assert [output.token_ids for output in outputs] == expected
