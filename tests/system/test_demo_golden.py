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
NUM_DECIDED_MIN = 10
UNDECIDED_MARGIN = 0.13
"""One step of a bfloat16 logit between 16 and 32, and a little. A choice that is decided by no more than that is up to
the order of rounding: on some of them transformers' own attention implementations, sdpa and eager, disagree."""


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
    def answer(self, prompt: str, max_tokens: int, picture: bytes | None = None) -> Answer:
        images = None if picture is None else [[Image.open(io.BytesIO(picture)).convert("RGB")]]
        inputs = self.processor(text=prompt, images=images, return_tensors="pt")
        if picture is not None:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        made = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        top = torch.cat(made.logits).float().topk(2).values
        return Answer(made.sequences[0, inputs["input_ids"].shape[1] :].tolist(), (top[:, 0] - top[:, 1]).min().item())


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and by how much the closest of their choices was decided."""

    token_ids: list[int]
    margin: float


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
    answers = [reference.answer(prompt, EQUAL_TOKENS) for prompt in prompts]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=EQUAL_TOKENS))
    decided = [i for i, answer in enumerate(answers) if answer.margin > UNDECIDED_MARGIN]
    assert len(decided) >= NUM_DECIDED_MIN
    assert [outputs[i].token_ids for i in decided] == [answers[i].token_ids for i in decided]


def test_digits(reference: Reference, llm: LLM) -> None:
    digits = digit_pictures()
    assert len(digits) == 20
    prompt = reference.prompt("What digit is this?", with_image=True)
    pictures = [digit.data for digit in digits]
    params = SamplingParams(temperature=0.0, max_tokens=28)
    outputs = llm.generate([prompt] * len(pictures), params, images=[[picture] for picture in pictures])
    expected = [reference.answer(prompt, 28, picture).token_ids for picture in pictures]
    assert [output.token_ids for output in outputs] == expected


def test_neighbours_change_nothing_in_bfloat16_either(reference: Reference, llm: LLM) -> None:
    prompts = [reference.prompt(question) for question in QUESTIONS[:10]]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    together = llm.generate(prompts, params)
    assert [output.token_ids for output in together] == alone
