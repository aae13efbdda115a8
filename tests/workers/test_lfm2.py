"""LFM2 against transformers, whatever the chunks, the neighbours, the drafts and the way a state came about."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from airside.workers.model_config import CheckpointError, check_block_size, load_model_config, tensor_parallel_sizes
from airside.workers.model_runner import ModelRunner
from tests.checkpoints import make_lfm2
from tests.workers.ranks import start_ranks
from tests.workers.rows import BLOCK_SIZE, Rig, Row, with_columns
from tests.workers.step_plans import Track, lone_runner, run_tracks, run_tracks_ahead

RNG = np.random.default_rng(5)
TOKENS = [RNG.integers(1, 512, length).tolist() for length in (23, 9, 1, 40)]
BLOCKS = [order.tolist() for order in np.split(np.random.default_rng(0).permutation(64), 4)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lfm2(tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def biased_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, with biases, a longer kernel, and an attention layer first and last."""
    types = ["full_attention", "conv", "conv", "full_attention"]
    return make_lfm2(tmp_path_factory.mktemp("biased"), tied=False, conv_bias=True, conv_L_cache=4, layer_types=types)


def transformers_logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0].float()


@pytest.mark.parametrize("checkpoint", ["path", "biased_path"])
def test_logits_are_those_of_transformers(checkpoint: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    rig = Rig(folder)
    for tokens, blocks in zip(TOKENS, BLOCKS, strict=True):
        expected = transformers_logits(folder, tokens)
        assert expected.std() > 0.1, "the checkpoint is too uniform to show anything"
        torch.testing.assert_close(rig.in_chunks(tokens, blocks, 64), expected, rtol=1e-4, atol=1e-4)


def test_attention_alone_needs_no_state(tmp_path: Path) -> None:
    folder = make_lfm2(tmp_path, layer_types=["full_attention"] * 4)
    logits = Rig(folder).in_chunks(TOKENS[0], BLOCKS[0], 7)
    torch.testing.assert_close(logits, transformers_logits(folder, TOKENS[0]), rtol=1e-4, atol=1e-4)


def test_bfloat16_rounds_no_worse_than_transformers(path: Path) -> None:
    exact = transformers_logits(path, TOKENS[3])
    theirs = (transformers_logits(path, TOKENS[3], torch.bfloat16) - exact).norm()
    ours = (Rig(path, dtype="bfloat16").in_chunks(TOKENS[3], BLOCKS[3], 64) - exact).norm()
    assert 0 < ours < 1.25 * theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", ["path", "biased_path"])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_change_no_bit(checkpoint: str, dtype: str, chunk: int, request: pytest.FixtureRequest) -> None:
    rig = Rig(request.getfixturevalue(checkpoint), dtype=dtype)
    whole = rig.in_chunks(TOKENS[0], BLOCKS[0], 64)
    assert torch.equal(rig.in_chunks(TOKENS[0], BLOCKS[1], chunk, slot=3), whole)


def test_neighbours_change_no_bit(path: Path) -> None:
    rig = Rig(path)
    alone = [rig.in_chunks(tokens, blocks, 64, slot=9) for tokens, blocks in zip(TOKENS, BLOCKS, strict=True)]
    made: list[list[torch.Tensor]] = [[] for _ in TOKENS]
    computed = [0] * len(TOKENS)
    for chunks in ([5, 9, 1, 1], [1, 0, 0, 20], [17, 0, 0, 1], [0, 0, 0, 18]):  # decodes beside chunks of prompts
        chosen = [i for i, chunk in enumerate(chunks) if chunk]
        rows = [Row(TOKENS[i], computed[i], computed[i] + chunks[i], BLOCKS[i], slot=7 - i) for i in chosen]
        for i, logits in zip(chosen, rig.step(rows), strict=True):
            made[i].append(logits)
            computed[i] += chunks[i]
    assert computed == [len(tokens) for tokens in TOKENS]
    for parts, expected in zip(made, alone, strict=True):
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("checkpoint", ["path", "biased_path"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_a_prefix_hit_goes_on_as_if_it_had_computed_it(
    checkpoint: str, chunk: int, request: pytest.FixtureRequest
) -> None:
    rig = Rig(request.getfixturevalue(checkpoint))
    shared = TOKENS[3][:16]
    rig.in_chunks([*shared, 1, 2, 3], BLOCKS[0], chunk)
    tokens = [*shared, 9, 8, 7, 6, 5]
    rig.in_chunks(TOKENS[0], BLOCKS[2], 64)  # slot 0 is another's now
    blocks = [*BLOCKS[0][: 16 // BLOCK_SIZE], *BLOCKS[1]]
    first = rig.step([Row(tokens, 16, 17, blocks, slot=5, state_from=blocks[3])])[0]  # shorter than the history
    then = rig.step([Row(tokens, 17, 21, blocks, slot=5)])[0]
    assert torch.equal(torch.cat((first, then)), rig.in_chunks(tokens, BLOCKS[3], 64)[16:])


@pytest.mark.parametrize("num_accepted", range(5))
@pytest.mark.parametrize("start", [3, 7, 20])
def test_rejected_drafts_leave_no_trace(path: Path, start: int, num_accepted: int) -> None:
    rig = Rig(path, max_draft_tokens=4)
    tokens = TOKENS[3]
    rig.in_chunks(tokens[:start], BLOCKS[0], 64)
    drafted = [*tokens[: start + 1 + num_accepted], *range(200, 204 - num_accepted)]
    rig.step([Row(drafted, start, start + 5, BLOCKS[0])])
    after = rig.step([Row(tokens, start + 1 + num_accepted, 36, BLOCKS[0])])[0]
    assert torch.equal(after, rig.in_chunks(tokens, BLOCKS[1], 64)[start + 1 + num_accepted : 36])


@pytest.mark.parametrize("seed", range(6))
def test_any_life_makes_the_same_logits(biased_path: Path, seed: int) -> None:
    """Chunks, rejected drafts, preemption, other slots and prefix hits in random order, beside a neighbour."""
    rng = np.random.default_rng(seed)
    rig = Rig(biased_path, max_draft_tokens=3)
    tokens, neighbour = TOKENS[3], TOKENS[0]
    expected = rig.in_chunks(tokens, BLOCKS[3], 64, slot=9)  # which also fills the blocks that hits share
    computed, slot, blocks, state_from, num_hits = 0, 0, BLOCKS[0], -1, 0
    while computed < len(tokens):
        if rng.random() < 0.2:  # preempted; comes back with other blocks in another slot
            num_shared = int(rng.integers(0, computed // BLOCK_SIZE + 1))
            blocks = [*BLOCKS[3][:num_shared], *rng.permutation(BLOCKS[0]).tolist()]
            computed, slot = num_shared * BLOCK_SIZE, int(rng.integers(0, 8))
            state_from = blocks[num_shared - 1] if num_shared else -1
            num_hits += num_shared > 0
        end = min(computed + int(rng.integers(1, 7)), len(tokens))
        num_drafts = min(int(rng.integers(0, 4)), end - computed - 1)
        fed = [*tokens[: end - num_drafts], *rng.integers(1, 512, num_drafts).tolist()]
        beside = int(rng.integers(0, 9))
        rows = [Row(fed, computed, end, blocks, slot, state_from), Row(neighbour, 0, beside + 1, BLOCKS[1], slot=8)]
        logits = rig.step(rows)[0][: end - num_drafts - computed]
        assert torch.equal(logits, expected[computed : end - num_drafts])
        computed, state_from = end - num_drafts, -1
    assert num_hits > 0 or seed not in (0, 1), "no hit was tried"


PROMPTS = [[7, 100, 200, 300, 5], list(range(60, 101)), [9], [11, 12] * 12]
NUM_TOKENS = 12


def tracks_for(prompts: list[list[int]]) -> list[Track]:
    return [Track(seq_id=i, tokens=list(prompt), blocks=BLOCKS[i]) for i, prompt in enumerate(prompts)]


def runner_for(path: Path, **changes: object) -> ModelRunner:
    return lone_runner(path, 64, **changes)


def expected_tokens(path: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    lengths = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    out = model.generate(torch.tensor([prompt]), do_sample=False, eos_token_id=None, pad_token_id=0, **lengths)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    made = [expected_tokens(path, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in made}) == len(PROMPTS), "the checkpoint is too uniform to show anything"
    return made


@pytest.mark.parametrize("chunk", [3, 16, 512])
def test_a_runner_makes_the_tokens_of_transformers(path: Path, expected: list[list[int]], chunk: int) -> None:
    runner, tracks = runner_for(path), tracks_for(PROMPTS)
    assert run_tracks(with_columns(runner.execute, tracks, has_state=True), tracks, chunk, NUM_TOKENS) == expected
    tracks = tracks_for(PROMPTS)
    ahead = with_columns(runner.execute, tracks, has_state=True)
    assert run_tracks_ahead(ahead, tracks, chunk, NUM_TOKENS) == expected


def test_drafts_change_no_token(path: Path, expected: list[list[int]]) -> None:
    runner, tracks, rng = runner_for(path, max_draft_tokens=3), tracks_for(PROMPTS), np.random.default_rng(0)

    def propose(track: Track) -> list[int]:
        right = expected[track.seq_id][len(track.made) :][:3]
        return [token if rng.random() < 0.7 else 200 for token in right]

    execute = with_columns(runner.execute, tracks, has_state=True)
    made = run_tracks(execute, tracks, 16, NUM_TOKENS, propose=propose)
    assert [tokens[:NUM_TOKENS] for tokens in made] == expected


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["path", "biased_path"])
def test_two_ranks_make_the_tokens_of_transformers(
    checkpoint: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    with start_ranks(folder, tmp_path, 2) as ranks:
        hellos = ranks.set_up(64)
        assert [hello.num_state_slots for hello in hellos] == [10, 10]
        tracks = tracks_for(PROMPTS)
        made = run_tracks(with_columns(ranks.step, tracks, has_state=True), tracks, 7, NUM_TOKENS)
    assert made == [expected_tokens(folder, prompt) for prompt in PROMPTS]


def test_a_config_as_liquid_writes_it(tmp_path: Path) -> None:
    values = {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-05,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
        "vocab_size": 65536,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_model_config(tmp_path)
    assert (config.intermediate_size, config.num_attention_layers) == (8192, 6)
    assert config.short_conv is not None
    assert config.short_conv.layers == (0, 1, 3, 4, 6, 7, 9, 11, 13, 15)
    assert config.short_conv.history == 2
    assert config.tie_word_embeddings
    assert config.rope.theta == 1e6
    assert tensor_parallel_sizes(config) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    "values",
    [
        {"intermediate_size": 1000, "block_multiple_of": 64},
        {"intermediate_size": 1000, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.3},
        {"intermediate_size": 1000, "block_auto_adjust_ff_dim": False},
    ],
)
def test_the_width_of_the_mlp_is_that_of_transformers(tmp_path: Path, values: dict[str, object]) -> None:
    theirs = Lfm2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, **values)
    theirs.architectures = ["Lfm2ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    assert load_model_config(tmp_path).intermediate_size == Lfm2MLP(theirs).w1.out_features


def test_blocks_shorter_than_the_history_are_refused(biased_path: Path) -> None:
    config = load_model_config(biased_path)
    check_block_size(config, 3)
    with pytest.raises(CheckpointError, match=r"block_size 2 is too small .* set engine\.block_size to 3 or more"):
        check_block_size(config, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["conv"]}, "layer_types must name each of 4 layers"),
        ({"layer_types": ["conv", "conv", "conv", "mamba"]}, "conv or full_attention"),
        ({"layer_types": ["conv"] * 4}, "without attention layers"),
    ],
)
def test_what_cannot_be_served_is_refused(path: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)
