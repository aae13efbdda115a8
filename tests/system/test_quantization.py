"""The offline `LLM` with quantised weights: the same tokens and log-probabilities alone and among others."""

from __future__ import annotations

from pathlib import Path

import pytest

from airside import LLM, SamplingParams
from airside.cluster.launch_plan import LaunchError
from tests.checkpoints import make_llama

pytestmark = pytest.mark.slow

PROMPTS = [[70 + 3 * i + j for j in range(2 + 7 * i)] for i in range(6)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)


def test_int8_gives_the_same_alone_and_among_others(tmp_path: Path) -> None:
    path = str(make_llama(tmp_path / "llama"))
    with LLM(path, quantization="int8", max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        together = llm.generate(PROMPTS, PARAMS)
        alone = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in alone] == [output.token_ids for output in together]
    assert [output.logprobs for output in alone] == [output.logprobs for output in together]


def test_blocks_are_refused_without_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"model\.quantization is gguf, but .* is not a \.gguf file"):
        LLM(str(make_llama(tmp_path / "llama")), quantization="gguf")
