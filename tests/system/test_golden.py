"""Golden tokens: greedy output equal to transformers, whatever the ranks, chunks, preemptions and neighbours."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from airside import LLM, SamplingParams
from tests.checkpoints import make_idefics3, make_llama

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
NUM_PROMPTS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

KV_BLOCKS = {"roomy": 1000, "tight": 14}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, KV heads, tokens, head_dim, float32


@dataclass(frozen=True)
class Golden:
    """A checkpoint, requests, and what transformers answers to each alone."""

    model: Path
    prompts: list[Any]
    images: list[list[bytes]]
    answers: list[list[int]]


def random_prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(60, 512) for _ in range(rng.choice([1, 5, 15, 16, 17, 40, 63]))] for _ in range(NUM_PROMPTS)]


def llama_golden(path: Path, tied: bool) -> Golden:
    make_llama(path, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = random_prompts(random.Random(tied))
    answers = [greedy(model, {"input_ids": torch.tensor([prompt])}) for prompt in prompts]
    return Golden(path, prompts, [[] for _ in prompts], answers)


def idefics3_golden(path: Path) -> Golden:
    make_idefics3(path)
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    rng = random.Random(3)
    prompts, files, answers = [], [], []
    for index in range(NUM_PROMPTS):
        text = f"<image>The picture {index} and <image>, are they alike?" if index % 4 else f"Only text, {index}."
        pictures = [noise(rng, width, height) for width, height in ((48, 64), (90, 30))] if index % 4 else []
        inputs = processor(text=text, images=[pictures] if pictures else None, return_tensors="pt")
        prompts.append(text)
        files.append([png(picture) for picture in pictures])
        answers.append(greedy(model, inputs))
    return Golden(path, prompts, files, answers)


def noise(rng: random.Random, width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@torch.inference_mode()
def greedy(model: Any, inputs: Any) -> list[int]:
    made = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    ids: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


@pytest.fixture(scope="module", params=["llama-tied", "llama-untied", "idefics3"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "idefics3":
            return idefics3_golden(path)
        case kind:
            return llama_golden(path, tied=kind == "llama-tied")


@pytest.mark.parametrize("pool", KV_BLOCKS)
@pytest.mark.parametrize("step_tokens", [16, 2048], ids=["chunks", "whole"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_to_transformers(golden: Golden, ranks: int, step_tokens: int, pool: str) -> None:
    options = {
        "tensor_parallel_size": ranks,
        "max_num_batched_tokens": step_tokens,
        "kv_cache_memory": KV_BLOCKS[pool]
        * (2 * 2 * 2 * 16 * 16 * 4)
        // ranks,  # k/v, layers, heads, tokens, dim, bytes
    }
    with LLM(str(golden.model), dtype="float32", max_num_seqs=8, max_model_len=200, **options) as llm:
        order = random.Random(f"{ranks} {step_tokens} {pool}").sample(range(NUM_PROMPTS), NUM_PROMPTS)
        outputs = llm.generate([golden.prompts[i] for i in order], GREEDY, images=[golden.images[i] for i in order])
        preemptions = llm.stats()["num_preemptions"]
    assert [output.token_ids for output in outputs] == [golden.answers[i] for i in order]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert (preemptions > 0) == (pool == "tight")
