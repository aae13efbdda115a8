"""Qwen2.5-VL against transformers: the tower, positions on three axes, and tokens, however prompts are cut."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, apply_rotary_pos_emb

from airside._core import EngineConfig
from airside.proto.messages import ImageRow, PixelsRef
from airside.vision_workers.families.registry import load_family
from airside.workers.axis_positions import place_on_axes
from airside.workers.layers import RotaryTable
from airside.workers.model_config import CheckpointError, RopeAxes, load_model_config
from airside.workers.model_configs.qwen2_5_vl import Qwen25VisionConfig
from airside.workers.models.qwen2_5_vl import Qwen25VLForConditionalGeneration
from airside.workers.parallel import RankGroup
from airside.workers.placed_rows import PlacedRows
from airside.workers.weights.safetensors_files import SafetensorsFiles
from tests.checkpoints import QWEN_MARK, QWEN_TOKENS, load_processor, make_qwen2_5_vl
from tests.workers.picture_engine import Asked, PictureServer, prepare
from tests.workers.pictures import picture, runner_for
from tests.workers.step_plans import BLOCK_SIZE

IMAGE = QWEN_TOKENS.index("<|image_pad|>")
NUM_TOKENS = 8
TEXTS = [
    f"{QWEN_MARK}What is it?{QWEN_MARK}And this?",
    f"The {QWEN_MARK} is",
    f"{QWEN_MARK}{QWEN_MARK}{QWEN_MARK}",
    "The red circle",
]
SIZES = [[(60, 20), (40, 100)], [(16, 16)], [(33, 90), (120, 40), (7, 5)], []]  # (width, height) of their pictures


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


def images_of(index: int) -> list[Any]:  # Any: PIL pictures
    return [picture(width, height, index) for width, height in SIZES[index]]


def load(path: Path) -> Qwen25VLForConditionalGeneration:
    weights = SafetensorsFiles(path, torch.float32, torch.device("cpu"))
    return Qwen25VLForConditionalGeneration(load_model_config(path), weights, RankGroup(0, 1), 64)


@cache
def expected(path: Path) -> list[list[int]]:
    """What transformers makes of each of `TEXTS` alone."""
    processor, model = load_processor(path), AutoModelForImageTextToText.from_pretrained(path).eval()
    made = []
    for index, text in enumerate(TEXTS):
        inputs = processor(text=text, images=images_of(index) or None, return_tensors="pt")
        out = model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        made.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return made


def requests(path: Path, arena: Path) -> list[Asked]:
    """`TEXTS`, as the server would get them."""
    family, tokenizer = load_family(str(path)), load_processor(path).tokenizer
    return [
        Asked(tokenizer(text)["input_ids"], [prepare(family, arena, image) for image in images_of(index)], NUM_TOKENS)
        for index, text in enumerate(TEXTS)
    ]


def server(path: Path, arena: Path, **values: Any) -> PictureServer:  # Any: fields of EngineConfig
    config: dict[str, Any] = {
        "num_blocks": 256,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "image_token_id": IMAGE,
        **values,
    }
    return PictureServer(runner_for(path, arena), EngineConfig(**config), IMAGE)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk", [4, 7, 256])
def test_tokens_are_those_of_transformers(path: Path, tmp_path: Path, chunk: int, is_async: bool) -> None:
    """Alone and together: chunks of 4 and 7 end inside of pictures, just before and just behind them."""
    running = server(path, tmp_path, max_num_batched_tokens=chunk, async_scheduling=is_async)
    assert running.generate(requests(path, tmp_path)) == expected(path)


def test_a_warm_cache_changes_nothing(path: Path, tmp_path: Path) -> None:
    """What is found ends inside of the prompt's last picture, or behind it."""
    running, asked = server(path, tmp_path), requests(path, tmp_path)
    running.generate(asked)
    assert running.engine.stats().prefix_cache_hits == 0
    assert running.generate(asked) == expected(path)
    prompts = [len(request.tokens) + sum(len(p.shape.expansion) - 1 for p in request.pictures) for request in asked]
    assert running.engine.stats().prefix_cache_hits == sum(
        (length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in prompts
    )


def test_a_cache_hit_may_end_inside_of_a_picture(path: Path, tmp_path: Path) -> None:
    family, tokenizer = load_family(str(path)), load_processor(path).tokenizer
    tokens = tokenizer(f"{QWEN_MARK}Two: {QWEN_MARK}")["input_ids"]
    small, large = (prepare(family, tmp_path, picture(side, side, 5)) for side in (24, 64))
    asked = Asked(tokens, [small, large], NUM_TOKENS)
    running = server(path, tmp_path, num_blocks=26)
    alone = running.generate([asked])
    # Another prompt takes the cached blocks, from the end of the first one on.
    running.generate([Asked([50, 51, 52, 53] * 10, [], 2)])
    hits = running.engine.stats().prefix_cache_hits
    assert running.generate([asked]) == alone
    found = running.engine.stats().prefix_cache_hits - hits
    begin = len(tokens) - 2 + len(small.shape.expansion) - 1
    assert begin < found < begin + len(large.shape.expansion)


def test_preempted_and_computed_again(path: Path, tmp_path: Path) -> None:
    running = server(path, tmp_path, num_blocks=56, max_num_batched_tokens=64, enable_prefix_caching=False)
    assert running.generate(requests(path, tmp_path) * 3) == expected(path) * 3
    assert running.engine.stats().recomputed_tokens > 100


def test_drafts_behind_pictures(path: Path, tmp_path: Path) -> None:
    """Every other draft is wrong."""
    asked = requests(path, tmp_path)
    for request, tokens in zip(asked, expected(path), strict=True):
        request.golden.extend(token if place % 2 else token + 1 for place, token in enumerate(tokens))
    running = server(path, tmp_path, draft_method="ngram", max_draft_tokens=3, max_num_batched_tokens=16)
    assert running.generate(asked) == expected(path)
    assert 0 < running.engine.stats().accepted_tokens < running.engine.stats().draft_tokens


@pytest.mark.parametrize("size", [(8, 8), (16, 24), (40, 40), (64, 64), (9, 200), (200, 16)])  # (width, height)
def test_pictures_are_encoded_as_transformers_does(path: Path, size: tuple[int, int]) -> None:
    """One window, several, cut ones at the right, the lower, and both edges."""
    pixels = {
        name: torch.from_numpy(value) for name, value in load_family(str(path)).process(picture(*size, 1)).items()
    }
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    with torch.inference_mode():
        found = load(path).encode_image(pixels)
        wanted = model.model.get_image_features(**pixels).pooler_output[0]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_turn_as_in_transformers(path: Path, dtype: torch.dtype) -> None:
    """Also the roundings."""
    table = RotaryTable(load_model_config(path), 64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn((5, heads, 16), generator=generator).to(dtype) for heads in (8, 2))
    positions = torch.tensor([[0, 3, 3, 3, 60], [0, 3, 4, 5, 60], [0, 7, 3, 4, 60]], dtype=torch.int32)
    rotary = Qwen2_5_VLRotaryEmbedding(AutoConfig.from_pretrained(path).text_config)
    cos, sin = rotary(q, positions[:, None])
    wanted = apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
    batch = PlacedRows(positions, *[torch.empty(0)] * 4)
    table.rotate(q, k, batch)
    for ours, theirs in zip((q, k), wanted, strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))


def test_positions_are_those_of_transformers(path: Path) -> None:
    """A whole prompt at once, and from any token of it on, as the engine would say where the row begins."""
    processor, model = load_processor(path), AutoModelForImageTextToText.from_pretrained(path)
    images = [picture(width, height, 1) for width, height in [(60, 20), (40, 100), (64, 64)]]
    inputs = processor(text=f"a{QWEN_MARK}bc{QWEN_MARK}{QWEN_MARK}d", images=images, return_tensors="pt")
    ids, grids = inputs["input_ids"][0].numpy(), [(1, h // 2, w // 2) for _, h, w in inputs["image_grid_thw"].tolist()]
    wanted, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])
    places, sizes = np.flatnonzero(ids == IMAGE), [h * w for _, h, w in grids]
    spans = [(int(places[sum(sizes[:i])]), size) for i, size in enumerate(sizes)]  # (begin, number of tokens)
    for begin in range(len(ids)):
        ended = [begin >= at + size for at, size in spans]
        shift = sum(size - max(grid) for size, grid, over in zip(sizes, grids, ended, strict=True) if over)
        rows = [
            ImageRow(1, i, max(begin - at, 0), size - max(begin - at, 0), PixelsRef("", 0, 0, []))
            for i, (at, size) in enumerate(spans)
            if not ended[i]
        ]
        positions = np.arange(begin, len(ids), dtype=np.int32) - np.int32(shift)
        left = [grid for grid, over in zip(grids, ended, strict=True) if not over]
        starts = np.array([0, len(positions)], np.int32)
        found = place_on_axes(positions, starts, np.flatnonzero(ids[begin:] == IMAGE), rows, left)
        assert np.array_equal(found, wanted[:, 0, begin:].numpy()), begin


@pytest.mark.parametrize(
    ("places", "row"),
    [([1, 2, 4], (0, 3)), ([1, 2, 3], (4, 3)), ([1, 2], (0, 3))],
    ids=["in pieces", "past its end", "too few"],
)
def test_image_tokens_that_do_not_fit_their_grid(places: list[int], row: tuple[int, int]) -> None:
    images, starts = [ImageRow(1, 0, *row, PixelsRef("", 0, 0, []))], np.array([0, 6], np.int32)
    with pytest.raises(ValueError, match="of image 0 do not fit its grid of"):
        place_on_axes(np.arange(6, dtype=np.int32), starts, np.array(places), images, [(1, 2, 3)])


def test_pixels_without_a_grid(path: Path, tmp_path: Path) -> None:
    running, (asked, *_) = server(path, tmp_path), requests(path, tmp_path)
    for made in asked.pictures:
        made.pixels.tensors.pop()
    with pytest.raises(ValueError, match="the pixels of image 0 came without image_grid_thw"):
        running.generate([asked])


def test_patches_that_make_no_picture(path: Path) -> None:
    with pytest.raises(ValueError, match="15 patches do not make a picture of 1 x 4 x 4"):
        load(path).encode_image({"pixel_values": torch.zeros((15, 96)), "image_grid_thw": torch.tensor([[1, 4, 4]])})


@pytest.mark.parametrize("prefixes", [("model.language_model.", "model.visual."), ("language_model.", "visual.")])
def test_tensors_may_have_the_names_of_another_release(path: Path, tmp_path: Path, prefixes: tuple[str, str]) -> None:
    shutil.copytree(path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        for old, new in zip(("model.", "visual."), prefixes, strict=True):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = tensor
    save_file(renamed, file, {"format": "pt"})
    assert server(file.parent, tmp_path).generate(requests(path, tmp_path)) == expected(path)


PUBLISHED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    "vocab_size": 151936,
}
"""As the 3B checkpoint has it, the decoder's keys beside the vision tower's."""


def write(folder: Path, **changes: Any) -> Path:  # Any: JSON
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    return folder


def test_a_published_config_is_read_as_by_transformers(tmp_path: Path) -> None:
    config, theirs = load_model_config(write(tmp_path)), AutoConfig.from_pretrained(write(tmp_path))
    text, tower = theirs.text_config, theirs.vision_config
    assert (config.hidden_size, config.intermediate_size) == (text.hidden_size, text.intermediate_size)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (36, 16, 2, 128)
    assert (config.vocab_size, config.rms_norm_eps) == (text.vocab_size, text.rms_norm_eps)
    assert (config.rope.rope_type, config.rope.theta) == ("default", text.rope_parameters["rope_theta"])
    assert (config.attention_bias, config.attention_out_bias, config.tie_word_embeddings) == (True, False, True)
    assert (config.image_token_id, config.eos_token_ids, config.dtype) == (151655, (151645,), "bfloat16")
    assert config.rope_axes == RopeAxes((16, 24, 24), 2)
    vision = config.vision
    assert isinstance(vision, Qwen25VisionConfig)
    assert (vision.hidden_size, vision.num_layers, vision.num_heads) == (tower.hidden_size, tower.depth, 16)
    assert (vision.patch_values, vision.window_tokens) == (3 * 2 * 14 * 14, 4)
    assert (vision.full_attention_layers, vision.rope_theta) == ((7, 15, 23, 31), tower.rope_parameters["rope_theta"])


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    """And the rope type of older releases."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    sparse = {"text_config": {"rope_scaling": rope}, "vision_config": {"out_hidden_size": 8192}}
    names = {"architectures": PUBLISHED["architectures"], "model_type": "qwen2_5_vl"}
    (tmp_path / "config.json").write_text(json.dumps({**names, **sparse}))
    config, theirs = load_model_config(tmp_path), Qwen2_5_VLConfig(**sparse)
    text, tower, vision = theirs.text_config, theirs.vision_config, config.vision
    assert isinstance(vision, Qwen25VisionConfig)
    assert (config.hidden_size, config.intermediate_size) == (text.hidden_size, text.intermediate_size)
    assert (config.num_layers, config.num_heads) == (text.num_hidden_layers, text.num_attention_heads)
    assert (config.num_kv_heads, config.vocab_size) == (text.num_key_value_heads, text.vocab_size)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (text.rms_norm_eps, text.max_position_embeddings)
    assert (config.rope.theta, config.image_token_id) == (1e6, theirs.image_token_id)
    assert (vision.hidden_size, vision.intermediate_size) == (tower.hidden_size, tower.intermediate_size)
    assert (vision.num_layers, vision.num_heads, vision.window_size) == (tower.depth, tower.num_heads, 112)
    assert vision.full_attention_layers == tuple(tower.fullatt_block_indexes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rope_scaling": {"mrope_section": [16, 24, 23]}},
            r"\[16, 24, 23\] must add up to half of the head dim.* 128",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type yarn is not supported"),
        ({"use_sliding_window": True, "max_window_layers": 20}, "sliding window attention is not supported"),
        ({"vision_config": {"out_hidden_size": 64}}, "makes vectors of 64 numbers .* hidden_size of 2048"),
        ({"vision_config": {"out_hidden_size": 2048, "hidden_act": "gelu"}}, "hidden_act gelu is not supported"),
        ({"vision_config": {"out_hidden_size": 2048, "patch_size": [14, 14]}}, "patch_size .* is not supported; one"),
        ({"vision_config": {"out_hidden_size": 2048, "window_size": 27}}, "window_size 27 is smaller than a token"),
        ({"vision_config": {"out_hidden_size": 2048, "num_heads": 15}}, "15 heads of the vision tower"),
    ],
)
def test_a_config_that_is_not_supported_says_why(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        load_model_config(write(tmp_path, **changes))
