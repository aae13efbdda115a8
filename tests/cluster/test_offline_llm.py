"""The offline `LLM` on real processes: what a request may ask for beside its text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airside import LLM, SamplingParams
from airside.controller.gateway.errors import RequestError
from tests.checkpoints import make_llama

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "The red fox"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint: Path = make_llama(tmp_path_factory.mktemp("offline") / "llama")
    with LLM(str(checkpoint), dtype="float32", max_num_seqs=8, max_model_len=256) as made:
        yield made


def test_log_probabilities_are_those_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], replace(GREEDY, logprobs=3, prompt_logprobs=0))
    assert [row.token_id for row in output.logprobs] == output.token_ids
    for row in output.logprobs:  # greedy: the likeliest is what was chosen
        assert row.top[0].token_id == row.token_id
        assert row.top[0].logprob == pytest.approx(row.logprob)
        assert [top.logprob for top in row.top] == sorted((top.logprob for top in row.top), reverse=True)
    assert [row.token_id for row in output.prompt_logprobs] == output.prompt_token_ids[1:]
    assert not llm.generate([PROMPT], GREEDY)[0].logprobs


def test_a_score_is_the_sum_of_what_generation_says(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], replace(GREEDY, logprobs=0))
    score = llm.score(PROMPT, output.token_ids)
    assert score.token_ids == output.token_ids
    assert score.logprobs == pytest.approx([row.logprob for row in output.logprobs], abs=1e-4)
    assert score.total == pytest.approx(sum(score.logprobs))
    other = [(token_id + 1) % 300 for token_id in output.token_ids]
    likely, unlikely = llm.score_all([PROMPT, PROMPT], [output.token_ids, other])
    assert likely.logprobs == pytest.approx(score.logprobs, abs=1e-4)
    assert unlikely.total < likely.total
    with pytest.raises(RequestError, match=r"continuations\[0\]: is empty"):
        llm.score(PROMPT, "")


def test_continuations_differ_by_their_seeds_and_can_be_had_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert output.token_ids == output.outputs[0].token_ids
    for completion in output.outputs:
        (alone,) = llm.generate([PROMPT], replace(params, n=1, seed=completion.seed))
        assert alone.token_ids == completion.token_ids


def test_a_stop_string_ends_text_and_tokens(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPT], GREEDY)
    stop = whole.text[3:5]
    (output,) = llm.generate([PROMPT], replace(GREEDY, stop=stop))
    (completion,) = output.outputs
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert (completion.finish_reason, completion.stop_match) == ("stop", stop)
    assert completion.token_ids == whole.token_ids[: completion.usage.completion_tokens]
    (included,) = llm.generate([PROMPT], replace(GREEDY, stop=[stop], include_stop=True))
    assert included.text == completion.text + stop


def test_structured_texts_are_of_their_form(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100)
    (chosen,) = llm.generate([PROMPT], replace(params, choice=["fox", "dog"]))
    assert chosen.text in ("fox", "dog")
    assert chosen.finish_reason == "stop"
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    (output,) = llm.generate([PROMPT], replace(params, json_schema=schema | {"additionalProperties": False}))
    assert isinstance(json.loads(output.text)["red"], bool)
    with pytest.raises(RequestError, match=r"structure\.regex"):
        llm.generate([PROMPT], replace(params, regex="a("))


@pytest.mark.parametrize("changes", [{"golden_acceptance": 0.5}, {"golden_acceptance": 1.0}])
def test_golden_drafts_change_no_token(llm: LLM, changes: dict[str, float]) -> None:
    (plain,) = llm.generate([PROMPT], GREEDY)
    (drafted,) = llm.generate([PROMPT], replace(GREEDY, golden_tokens=plain.token_ids, drafts_max=4, **changes))
    assert drafted.token_ids == plain.token_ids
    assert drafted.usage.draft_tokens >= drafted.usage.accepted_tokens > 0


def test_a_prompt_seen_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = [5 + i % 200 for i in range(100)]
    (first,), (again,) = llm.generate([prompt], GREEDY), llm.generate([prompt], GREEDY)
    (salted,) = llm.generate([prompt], replace(GREEDY, cache_salt="other"))
    assert first.token_ids == again.token_ids == salted.token_ids
    assert (first.usage.cached_tokens, again.usage.cached_tokens, salted.usage.cached_tokens) == (0, 96, 0)
    assert again.timings.prefill_s > 0


def test_the_front_end_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Of what it would import beside them, `torch` alone is 140 MB."""
    program = f"""
import sys
from airside import LLM, SamplingParams
with LLM({str(make_llama(tmp_path / "llama"))!r}, max_num_seqs=2, max_model_len=64) as llm:
    (output,) = llm.generate([{PROMPT!r}], SamplingParams(max_tokens=9, choice=["red", "blue"]))
assert output.token_ids
print([name for name in ("torch", "transformers", "ray", "gguf") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
