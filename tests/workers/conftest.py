"""Checkpoints that several tests share; each is written once per run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_idefics3, make_llama


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def untied_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, with biases and llama3 rotary scaling, in several files."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return make_llama(
        tmp_path_factory.mktemp("untied"),
        tied=False,
        max_shard_size="200KB",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope,
    )


@pytest.fixture(scope="session")
def odd_vocabulary_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, with a vocabulary that two ranks cannot share evenly."""
    return make_llama(tmp_path_factory.mktemp("odd"), vocab_size=511)


@pytest.fixture(scope="session")
def idefics3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))
