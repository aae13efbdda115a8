"""Pictures and text against transformers: tiles, chunks that cut through pictures, mixed batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from airside.proto.messages import PixelsRef
from airside.workers.model_config import load_model_config
from airside.workers.models.idefics3 import Idefics3ForConditionalGeneration
from airside.workers.parallel import RankGroup
from airside.workers.weights.safetensors_files import SafetensorsFiles
from tests.workers.pictures import (
    NUM_TOKENS,
    Prompt,
    expected_tokens,
    generate,
    make_prompt,
    picture,
    runner_for,
    tracks_for,
)
from tests.workers.step_plans import Track, plan_step, run_tracks, scattered_blocks


def prompts_for(path: Path, arena: Path) -> list[Prompt]:
    """Two pictures of different shape in one prompt, one picture in another, none in the third."""
    wide, tall, small = picture(60, 20, 1), picture(40, 100, 2), picture(16, 16, 3)
    return [
        make_prompt(path, arena, "<image>What is it?<image>And this?", [wide, tall], "a"),
        make_prompt(path, arena, "The <image> is", [small], "b"),
        make_prompt(path, arena, "The red circle", [], "c"),
    ]


@pytest.mark.parametrize("chunk", [5, 16, 512])
def test_pictures_and_text_make_the_tokens_of_transformers(idefics3_path: Path, tmp_path: Path, chunk: int) -> None:
    prompts = prompts_for(idefics3_path, tmp_path)
    made = generate(runner_for(idefics3_path, tmp_path), prompts, chunk)
    assert made == [expected_tokens(idefics3_path, prompt) for prompt in prompts]


@pytest.mark.parametrize("same_process", [True, False])
def test_a_recompute_finds_the_pictures_in_their_places(
    idefics3_path: Path, tmp_path: Path, same_process: bool
) -> None:
    """Preempted, or moved to a new worker: everything is computed again, in other blocks and other chunks."""
    prompts = prompts_for(idefics3_path, tmp_path)
    runner = runner_for(idefics3_path, tmp_path)
    whole = generate(runner, prompts, 512)
    tracks = tracks_for(prompts)
    run_tracks(runner.execute, tracks, 16, NUM_TOKENS // 2)
    for track, other in zip(tracks, tracks_for(prompts, seed=1), strict=True):
        track.blocks, track.computed = other.blocks, 0
    later = runner if same_process else runner_for(idefics3_path, tmp_path)
    assert run_tracks(later.execute, tracks, 7, NUM_TOKENS) == whole


def test_another_picture_gives_another_text(idefics3_path: Path, tmp_path: Path) -> None:
    prompts = [make_prompt(idefics3_path, tmp_path, "<image>", [picture(30, 30, seed)], str(seed)) for seed in range(4)]
    made = generate(runner_for(idefics3_path, tmp_path), prompts, 512)
    assert len({tuple(tokens) for tokens in made}) > 1


def test_a_picture_cut_into_chunks_is_encoded_once(idefics3_path: Path, tmp_path: Path) -> None:
    runner = runner_for(idefics3_path, tmp_path)
    encode, encoded = runner._images._encode, list[str]()

    def count(pixels: PixelsRef) -> torch.Tensor:
        encoded.append(pixels.segment)
        return encode(pixels)

    runner._images._encode = count
    generate(runner, prompts_for(idefics3_path, tmp_path)[:1], 5)
    assert encoded == ["a-0", "a-1"]


def test_padded_tiles_are_encoded_as_transformers_does(idefics3_path: Path) -> None:
    """Tiles of which only the upper left is picture, and one that is full, in one batch."""
    model = AutoModelForImageTextToText.from_pretrained(idefics3_path)
    config = load_model_config(idefics3_path)
    weights = SafetensorsFiles(idefics3_path, torch.float32, torch.device("cpu"))
    ours = Idefics3ForConditionalGeneration(config, weights, RankGroup(0, 1), 64)
    values = torch.randn((1, 3, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros((1, 3, 32, 32), dtype=torch.int64)
    for tile, (height, width) in enumerate([(32, 32), (17, 24), (8, 32)]):
        mask[0, tile, :height, :width] = 1
    with torch.inference_mode():
        expected = torch.cat(model.model.get_image_features(values, mask).pooler_output)
        found = ours.encode_image({"pixel_values": values, "pixel_attention_mask": mask})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_more_image_tokens_than_embeddings_is_refused(idefics3_path: Path, tmp_path: Path) -> None:
    runner = runner_for(idefics3_path, tmp_path)
    prompt = prompts_for(idefics3_path, tmp_path)[1]
    track = Track(1, [*prompt.tokens, 3], scattered_blocks(1, 32)[0], prompt.pixels, prompt.image_places)
    with pytest.raises(ValueError, match=r"step 7 has \d+ image tokens and \d+ image embeddings"):
        runner.execute(plan_step(7, [track], [len(track.tokens)]))
