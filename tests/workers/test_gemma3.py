"""Gemma 3 against transformers: windows, pictures that see all of themselves, and where chunks may end."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from airside._core import Engine, EngineConfig, Request
from airside.proto.messages import ImageRow, PixelsRef
from airside.workers.model_config import CheckpointError, load_model_config
from airside.workers.picture_sights import find_sight_ends
from airside.workers.step_batch import Rows
from tests.checkpoints import GEMMA_IMAGE_TOKENS, GEMMA_MARK, GEMMA_TOKENS, make_gemma3, make_gemma3_text
from tests.engine.columns import i32
from tests.workers.engine_loop import ReadyImage, run_engine
from tests.workers.pictures import NUM_TOKENS, Prompt, expected_tokens, generate, make_prompt, picture, runner_for
from tests.workers.step_plans import BLOCK_SIZE, Track, lone_runner, run_tracks, scattered_blocks

IMAGE_ID = GEMMA_TOKENS.index("<image_soft_token>")
NEVER = [IMAGE_ID, GEMMA_TOKENS.index(GEMMA_MARK)]
WINDOW = 8


@pytest.fixture(scope="module")
def gemma3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def text_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3_text(tmp_path_factory.mktemp("gemma3_text"))


def generate_text(path: Path, prompts: list[list[int]], chunk: int, **changes: object) -> list[list[int]]:
    blocks = scattered_blocks(len(prompts), 64)
    tracks = [Track(i, list(tokens), blocks[i]) for i, tokens in enumerate(prompts)]
    return run_tracks(lone_runner(path, 64 * len(prompts), **changes).execute, tracks, chunk, NUM_TOKENS)


@torch.inference_mode()
def expected_text(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    out = model.generate(torch.tensor([tokens]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    made: list[int] = out[0, len(tokens) :].tolist()
    return made


TEXTS = [[7 + (i * i + length) % 400 for i in range(length)] for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 40, 130)]
"""Shorter than the window, and longer than it and than the kernel's tiles of keys."""


@pytest.mark.parametrize("chunk", [3, 512])
def test_text_makes_the_tokens_of_transformers(text_path: Path, chunk: int) -> None:
    assert generate_text(text_path, TEXTS, chunk) == [expected_text(text_path, tokens) for tokens in TEXTS]


def test_windows_matter(text_path: Path, tmp_path: Path) -> None:
    """Guards the test above: other windows give other texts, and so do other frequencies."""
    made = generate_text(text_path, TEXTS, 512)
    others: list[dict[str, Any]] = [{"sliding_window": 9}, {"layer_types": ["full_attention"] * 3}]
    for number, changes in enumerate(others):
        other = make_gemma3_text(tmp_path / str(number), **changes)
        assert generate_text(other, TEXTS, 512) == [expected_text(other, tokens) for tokens in TEXTS]
        assert generate_text(other, TEXTS, 512) != made


def logits_of(path: Path, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """In bfloat16, of the last token: ours as the log-probabilities of all, and transformers' logits."""
    runner = lone_runner(path, 64, dtype="bfloat16")
    seen: list[Tensor] = []
    logits = runner._model.logits

    def spy(hidden: Tensor) -> Tensor | None:
        made = logits(hidden)
        assert made is not None
        seen.append(made)
        return made

    runner._model.logits = spy  # type: ignore[method-assign]
    run_tracks(runner.execute, [Track(0, list(tokens), list(range(64)))], 512, 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0, -1]
    return seen[0][0].float(), reference.float()


def test_bfloat16_is_close_to_transformers(text_path: Path) -> None:
    """Norms round once and embeddings are scaled by the rounded root: else the error would be several times larger."""
    ours, theirs = logits_of(text_path, TEXTS[-1])
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def prompt_with(path: Path, arena: Path, text: str, images: list[Image.Image], name: str) -> Prompt:
    return make_prompt(path, arena, text, images, name, GEMMA_MARK, IMAGE_ID)


def prompts_for(path: Path, arena: Path) -> list[Prompt]:
    wide, tall, small = picture(60, 20, 1), picture(40, 100, 2), picture(16, 16, 3)
    mark = GEMMA_MARK
    return [
        prompt_with(path, arena, f"{mark}What is it?{mark}And this?", [wide, tall], "a"),
        prompt_with(path, arena, f"The {mark} is", [small], "b"),
        prompt_with(path, arena, "The red circle is in the middle of the picture, and the passenger waits", [], "c"),
        prompt_with(path, arena, f"{mark}{mark}{mark}", [small, wide, tall], "d"),
    ]


def test_pictures_and_text_make_the_tokens_of_transformers(gemma3_path: Path, tmp_path: Path) -> None:
    prompts = prompts_for(gemma3_path, tmp_path)
    made = generate(runner_for(gemma3_path, tmp_path), prompts, 512)
    assert made == [expected_tokens(gemma3_path, prompt, NEVER) for prompt in prompts]
    assert len({tuple(tokens) for tokens in made}) == len(made)


RELEASES = {
    "with vision_model": [("vision_tower.", "vision_tower.vision_model.")],
    "model in front": [
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
}


@pytest.mark.parametrize("release", RELEASES)
def test_the_tensors_of_all_releases_are_found(gemma3_path: Path, tmp_path: Path, release: str) -> None:
    shutil.copytree(gemma3_path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        new = next((to + name.removeprefix(old) for old, to in RELEASES[release] if name.startswith(old)), name)
        renamed[new] = tensor
    save_file(renamed, file)
    prompts = prompts_for(gemma3_path, tmp_path)
    expected = generate(runner_for(gemma3_path, tmp_path), prompts, 512)
    assert generate(runner_for(tmp_path / "model", tmp_path), prompts, 512) == expected


def test_the_head_may_be_that_of_the_embeddings(tmp_path: Path) -> None:
    path = make_gemma3(tmp_path / "model", tied=True)
    prompts = prompts_for(path, tmp_path)
    made = generate(runner_for(path, tmp_path), prompts, 512)
    assert made == [expected_tokens(path, prompt, NEVER) for prompt in prompts]


def sight_ends(tokens: list[list[int]], begins: list[int], embeds: list[tuple[int, int]]) -> list[int]:
    """`find_sight_ends` of rows with these tokens; `embeds`: (row, count) of the pictures."""
    flat = [token for row in tokens for token in row]
    rows = Rows(
        seq_ids=np.arange(len(tokens), dtype=np.uint64),
        num_computed=np.array(begins, np.int32),
        num_new=np.array([len(row) for row in tokens], np.int32),
        sampled=np.zeros(len(tokens), np.int32),
        starts=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        token_ids=np.array(flat, np.int64),
    )
    nowhere = PixelsRef("", 0, 0, [])
    images = [ImageRow(row, index, 0, count, nowhere) for index, (row, count) in enumerate(embeds)]
    found: list[int] = find_sight_ends(rows, images, 5).tolist()
    return found


def test_a_token_sees_to_the_end_of_its_own_picture() -> None:
    assert sight_ends([[1, 5, 5, 5, 2, 5, 1]], [0], [(0, 4)]) == [1, 4, 4, 4, 5, 6, 7]
    # The row begins inside of a picture; another picture follows at once; the next row is another sequence.
    assert sight_ends([[5, 5, 5, 5], [5, 5], [1]], [10, 0, 7], [(0, 1), (0, 3), (1, 2)]) == [11, 14, 14, 14, 2, 2, 8]
    assert sight_ends([[1, 2]], [3], []) == [4, 5]
    with pytest.raises(ValueError, match="2 image tokens and 1 image embeddings"):
        sight_ends([[5, 5]], [0], [(0, 1)])


def changed(path: Path, folder: Path, **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation relu"),
        ({"sliding_window": None}, "sliding_window None is no window"),
        ({"layer_types": ["full_attention"]}, "layer_types must name each of 3 layers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope type yarn"),
    ],
)
def test_what_is_not_supported_is_refused(
    text_path: Path, tmp_path: Path, values: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load_model_config(changed(text_path, tmp_path, **values))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"mm_tokens_per_image": 16}, "cannot be pooled evenly"),
        ({"mm_tokens_per_image": 8}, "cannot be pooled evenly"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "tower of type clip_vision_model"),
        ({"text_config": {"model_type": "llama"}}, "text model of type llama"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(
    gemma3_path: Path, tmp_path: Path, values: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load_model_config(changed(gemma3_path, tmp_path, **values))


def test_a_published_config_says_only_what_differs(tmp_path: Path) -> None:
    """That of gemma-3-4b-it, with the keys of transformers 4."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "eos_token_id": [1, 106],
        "image_token_index": 262_144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_model_config(tmp_path)
    assert config.sliding is not None
    assert config.sliding.layers == tuple(i for i in range(34) if i % 6 != 5)
    assert (config.sliding.window, config.sliding.rope.theta, config.sliding.rope.rope_type) == (
        1024,
        10_000.0,
        "default",
    )
    assert (config.rope.theta, config.rope.rope_type, config.rope.factor) == (1_000_000.0, "linear", 8.0)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale) == (8, 4, 256, 1 / 16)
    assert (config.image_token_id, config.pictures.mark_id, config.pictures.num_atomic) == (262_144, 255_999, 256)
    assert (config.vocab_size, config.tie_word_embeddings, config.dtype) == (262_208, True, "bfloat16")
    assert dataclasses.asdict(config)["vision"]["tokens_per_side"] == 16


def requests_for(
    prompts: list[Prompt], seq_ids: list[int], golden: list[list[int]] | None = None
) -> tuple[list[Request], dict[int, list[ReadyImage]]]:
    """The prompts as an engine takes them, with a mark for each picture; `golden`: what to offer as drafts."""
    image = i32(
        [GEMMA_TOKENS.index(GEMMA_MARK), *[IMAGE_ID] * GEMMA_IMAGE_TOKENS, GEMMA_TOKENS.index("<end_of_image>")]
    )
    requests, images = [], {}
    offered = golden or [[] for _ in prompts]
    for seq_id, prompt, drafts in zip(seq_ids, prompts, offered, strict=True):
        inside = {place for places in prompt.image_places for place in [*places, places[-1] + 1]}
        tokens = [token for place, token in enumerate(prompt.tokens) if place not in inside]
        marks = [i for i, token in enumerate(tokens) if token == GEMMA_TOKENS.index(GEMMA_MARK)]
        requests.append(
            Request(
                client=0,
                seq_id=seq_id,
                token_ids=i32(tokens),
                image_positions=marks,
                image_hashes=[pixels.segment.encode().ljust(16, b".") for pixels in prompt.pixels],
                arrival=float(seq_id),
                max_tokens=NUM_TOKENS,
                temperature=0.0,
                golden_tokens=i32(drafts),
                golden_mode="draft" if drafts else "",
                golden_acceptance=0.6,
            )
        )
        images[seq_id] = [ReadyImage(image, pixels) for pixels in prompt.pixels]
    return requests, images


def engine_config(**values: Any) -> EngineConfig:  # Any: fields of EngineConfig
    defaults: dict[str, Any] = {
        "num_blocks": 256,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 256,
        "image_token_id": IMAGE_ID,
        "image_mark_id": GEMMA_TOKENS.index(GEMMA_MARK),
        "atomic_images": True,
    }
    return EngineConfig(**{**defaults, **values})


ENGINES: dict[str, dict[str, Any]] = {
    "a picture is a step": {"max_num_batched_tokens": GEMMA_IMAGE_TOKENS},
    "chunks": {"max_num_batched_tokens": 13},
    "whole prompts": {"max_num_batched_tokens": 256, "enable_chunked_prefill": False},
    "drafts": {"max_draft_tokens": 4, "max_num_batched_tokens": 13},
    "preemption": {"num_blocks": 21},
    "one step at a time": {"async_scheduling": False, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("kind", ENGINES)
def test_however_an_engine_cuts_it(gemma3_path: Path, tmp_path: Path, kind: str) -> None:
    prompts = prompts_for(gemma3_path, tmp_path)
    expected = [expected_tokens(gemma3_path, prompt, NEVER) for prompt in prompts]
    golden = expected if kind == "drafts" else None
    requests, images = requests_for(prompts, [0, 1, 2, 3], golden)
    outcome = run_engine(runner_for(gemma3_path, tmp_path), engine_config(**ENGINES[kind]), requests, images)
    assert [outcome.tokens[seq_id] for seq_id in range(4)] == expected
    assert (outcome.num_preemptions > 0) == (kind == "preemption")
    assert kind != "drafts" or outcome.num_drafted > outcome.num_accepted > 0


@pytest.mark.parametrize("text", ["ab {0}", "On and on: {0}"])
def test_a_prefix_that_ends_inside_a_picture_is_shared(gemma3_path: Path, tmp_path: Path, text: str) -> None:
    """The row that goes on inside of it computes the rest, and sees what the cache has of the whole."""
    text = text.format(GEMMA_MARK)
    prompt = prompt_with(gemma3_path, tmp_path, text, [picture(60, 20, 1)], "same")
    runner, config = runner_for(gemma3_path, tmp_path), engine_config()
    engine = Engine(config)
    first, its_images = requests_for([prompt], [0])
    whole = run_engine(runner, config, first, its_images, engine)
    again, its_images = requests_for([prompt], [1])
    # The last token is always computed, so of a prompt that ends soon after its picture the cache has a part of that.
    outcome = run_engine(runner, config, again, its_images, engine)
    begin, end = prompt.image_places[0][0], prompt.image_places[0][-1] + 1
    assert begin < outcome.num_cached < end
    assert whole.tokens[0] == outcome.tokens[1] == expected_tokens(gemma3_path, prompt, NEVER)
