"""Golden tokens of every family that takes pictures: equal to transformers, on one rank and two, however it is cut."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from airside import LLM, SamplingParams
from tests.checkpoints import GEMMA_MARK, QWEN_MARK, make_gemma3, make_idefics3, make_llava, make_qwen2_5_vl
from tests.system.golden import NEW_TOKENS, NUM_PROMPTS, Golden, picture_golden

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "idefics3": (make_idefics3, "<image>"),
    "llava-clip-llama": (make_llava, "<image>"),
    "llava-siglip-qwen2": (functools.partial(make_llava, tower="siglip", text="qwen2"), "<image>"),
    "qwen2_5_vl": (make_qwen2_5_vl, QWEN_MARK),
    "gemma3": (make_gemma3, GEMMA_MARK),
}
"""What makes a checkpoint of each family, and its mark for a picture. A picture has more tokens than a chunk below,
but for Gemma 3's, which come whole: two do not fit there."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    make, mark = CHECKPOINTS[request.param]
    return picture_golden(make(tmp_path_factory.mktemp(request.param)), mark)


@pytest.mark.parametrize("step_tokens", [11, 2048], ids=["chunks", "whole"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_to_transformers(golden: Golden, ranks: int, step_tokens: int) -> None:
    with LLM(
        str(golden.model),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=512,
        tensor_parallel_size=ranks,
        max_num_batched_tokens=step_tokens,
        kv_cache_memory=64 << 20,
    ) as llm:
        order = random.Random(f"{ranks} {step_tokens}").sample(range(NUM_PROMPTS), NUM_PROMPTS)
        outputs = llm.generate([golden.prompts[i] for i in order], GREEDY, images=[golden.images[i] for i in order])
    assert [output.token_ids for output in outputs] == [golden.answers[i] for i in order]
    assert {output.finish_reason for output in outputs} == {"length"}
