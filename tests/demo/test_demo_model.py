"""The real demo model, from the real wheel, in plain transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from airside.cluster.demo_model.exhibits import exhibits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processor(built_demo: Path) -> Any:
    return AutoProcessor.from_pretrained(built_demo)


@pytest.fixture(scope="module")
def model(built_demo: Path) -> Any:
    loaded, report = AutoModelForImageTextToText.from_pretrained(
        built_demo, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded.eval()


def answers(processor: Any, model: Any, questions: list[str], pictures: list[tuple[bytes, ...]]) -> list[str]:
    """Greedy replies to chats of one question each, with or without pictures."""
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [*[{"type": "image"}] * len(files), {"type": "text", "text": question}]}],
            add_generation_prompt=True,
        )
        for question, files in zip(questions, pictures, strict=True)
    ]
    processor.tokenizer.padding_side = "left"
    images = [[Image.open(io.BytesIO(data)).convert("RGB") for data in files] for files in pictures]
    inputs = processor(text=texts, images=images if any(images) else None, padding=True, return_tensors="pt")
    if any(images):
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    replies: list[str] = processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def test_folder_holds_a_checkpoint_and_nothing_else(built_demo: Path) -> None:
    assert {path.name for path in built_demo.iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    config = json.loads((built_demo / "config.json").read_text())
    with safe_open(built_demo / "model.safetensors", "pt") as weights:
        shape = weights.get_slice("model.text_model.embed_tokens.weight").get_shape()
        assert shape == [config["text_config"]["vocab_size"], config["text_config"]["hidden_size"]]


def test_token_ids(processor: Any) -> None:
    tokenizer = processor.tokenizer
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4, 6]
    assert len(tokenizer) == 49152
    chat = processor.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids = tokenizer(chat)["input_ids"]
    assert [i for i in ids if i < 17] == [1, 2, 1, 2, 1]  # system, user, assistant: nothing added of its own
    assert tokenizer.tokenize("one\n\n12 days") == ["one", "ĊĊ", "1", "2", "Ġdays"]
    text = "Straße, 数字 12345\n\n\tdef f(x):  return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_one_picture_is_nineteen_tokens(processor: Any) -> None:
    image = Image.new("RGB", (300, 200))
    ids = processor(text="<image>What?", images=[image], return_tensors="pt")["input_ids"][0].tolist()
    assert ids[:19] == [4, 6, *[3] * 16, 4]


def test_text_side_answers_as_smollm2_does(processor: Any, model: Any) -> None:
    replies = answers(processor, model, ["What is the capital of France?", "What is 2+3?"], [(), ()])
    assert "Paris" in replies[0]
    assert "5" in replies[1]


def test_held_out_pictures_are_answered(processor: Any, model: Any) -> None:
    shown = exhibits()
    replies = answers(processor, model, [e.question for e in shown], [e.pictures for e in shown])
    wrong = [(e.title, e.answer, said) for e, said in zip(shown, replies, strict=True) if said != e.answer]
    assert len(wrong) <= 3, wrong
