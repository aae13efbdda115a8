"""The offline `LLM` on real processes: bad input, the loss of a process, and life after an interrupted call."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from airside import LLM, SamplingParams
from airside.cluster.offline import OfflineError
from airside.cluster.offline.generation import Generations
from airside.controller.gateway.errors import RequestError
from tests.checkpoints import VOCAB_SIZE, make_llama

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(str(make_llama(tmp_path / "llama")), dtype="float32", max_num_seqs=8) as made:
        yield made


def children(llm: LLM) -> dict[str, int]:
    return {name: llm._processes.pid(name) for name in ("controller", "worker-0")}


def test_it_answers_refuses_and_leaves_nothing(llm: LLM) -> None:
    pids = children(llm)
    (first,), (again,) = llm.generate(["The red"], GREEDY), llm.generate(["The red"], GREEDY)
    assert first.token_ids == again.token_ids
    assert (first.finish_reason, len(first.token_ids)) == ("length", 8)
    with pytest.raises(RequestError, match=r"prompts\[1\]\[0\]: is 512"):
        llm.generate(["fine", [VOCAB_SIZE]], GREEDY)
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate(["fine"], SamplingParams(max_tokens=0))
    assert llm.stats()["generation_tokens"] == 16  # nothing of a refused call was computed
    llm.close()
    llm.close()
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]


def test_a_score_is_the_log_probability_that_transformers_computes(llm: LLM, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32).eval()
    rng = random.Random(4)
    pairs = [([rng.randrange(60, 512) for _ in range(size)], rng.sample(range(60, 512), 9)) for size in (1, 16, 40)]
    pairs.append(([70, 71], [80, model.config.eos_token_id, 81]))  # an end token within ends nothing
    for (prompt, continuation), score in zip(pairs, llm.score_all(*zip(*pairs, strict=True)), strict=True):
        assert score.token_ids == continuation
        assert score.logprobs == pytest.approx(log_probabilities(model, prompt, continuation), abs=1e-4)
        assert score.total == sum(score.logprobs)
    assert llm.score("The red", " circle").token_ids  # texts, too
    with pytest.raises(RequestError, match=r"continuations\[0\]: is empty"):
        llm.score("The red", "")
    with pytest.raises(RequestError, match=r"continuations: has 2 entries for 1 prompts"):
        llm.score_all(["The red"], [" circle", " square"])
    with pytest.raises(RequestError, match=r"images: has 0 entries for 1 prompts"):
        llm.generate(["The red"], images=[])


def log_probabilities(model: torch.nn.Module, prompt: list[int], continuation: list[int]) -> list[float]:
    """Of each token of the continuation, given all before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(continuation)), continuation].tolist()


def test_an_interrupted_call_leaves_the_engine_to_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> set[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Generations, "_take_batch", interrupted)  # at the first tokens
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two", "three"], LONG)
    (output,) = llm.generate(["four"], GREEDY)
    assert output.finish_reason == "length"
    assert llm.stats()["num_requests_running"] == 0


def test_a_dead_process_is_an_error_with_its_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> set[int]:
        os.kill(children(llm)["worker-0"], signal.SIGKILL)
        return set()

    monkeypatch.setattr(Generations, "_take_batch", kill)
    with pytest.raises(OfflineError, match="worker-0"):
        llm.generate(["one"], LONG)
