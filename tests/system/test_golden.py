"""Golden tokens: greedy output equal to transformers, whatever the ranks, chunks, preemptions and neighbours."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from airside import LLM, SamplingParams
from tests.checkpoints import make_idefics3, make_llama
from tests.system.golden import NEW_TOKENS, NUM_PROMPTS, Golden, greedy, picture_golden

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

KV_BLOCKS = {"roomy": 1000, "tight": 14}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, KV heads, tokens, head_dim, float32


def random_prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(60, 512) for _ in range(rng.choice([1, 5, 15, 16, 17, 40, 63]))] for _ in range(NUM_PROMPTS)]


def llama_golden(path: Path, tied: bool) -> Golden:
    make_llama(path, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = random_prompts(random.Random(tied))
    answers = [greedy(model, {"input_ids": torch.tensor([prompt])}) for prompt in prompts]
    return Golden(path, prompts, [[] for _ in prompts], answers)


@pytest.fixture(scope="module", params=["llama-tied", "llama-untied", "idefics3"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "idefics3":
            return picture_golden(make_idefics3(path))
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
