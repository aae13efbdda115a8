from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, processors

from airside.controller.gateway.chat_checks import check_chat
from airside.controller.gateway.errors import ModelFilesError, RequestError
from airside.controller.gateway.generation_defaults import GenerationDefaults
from airside.controller.gateway.request_checks import ImageLimits, check_marks
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto.settings import GatewaySettings
from tests.gateway.tiny_checkpoint import END_ID, IMAGE_ID, SPECIAL, write_checkpoint

SMOLLM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "Ċ", "Ġ", "ĊĊ", "ab", "Ġa"]

HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_end_ids_come_from_all_that_name_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, generation_config={"eos_token_id": [5, 4]})
    assert TextModel.load(str(folder)).end_ids == [END_ID, 4, 5]
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=7)
    assert TextModel.load(str(folder)).end_ids == [END_ID, 7]


def test_end_tokens_have_no_text_even_when_they_are_plain_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, generation_config={"eos_token_id": 40})
    model = TextModel.load(str(folder))
    assert model.detokenizer().push([41, 40, 41]) == model.detokenizer().push([41, 41])


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index"])
def test_the_image_mark(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, images=False)
    assert (TextModel.load(str(folder)).image_mark_id, TextModel.load(str(folder)).image_mark) == (None, "")
    edit(folder / "config.json", **{name: IMAGE_ID})
    model = TextModel.load(str(folder))
    assert (model.image_mark_id, model.image_mark, model.accepts_images) == (IMAGE_ID, "<image>", True)


def test_an_image_mark_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    edit(folder / "config.json", image_token_id=99_999)
    with pytest.raises(ModelFilesError, match="99999"):
        TextModel.load(str(folder))


def test_begin_tokens_are_added_where_the_tokenizer_wants_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = ("<|begin|>", SPECIAL.index("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = TextModel.load(str(folder))
    assert model.encode("a", add_special_tokens=True).ids[0] == begin[1]
    assert model.encode("a", add_special_tokens=False).ids[0] != begin[1]


def test_a_processors_chat_template_comes_first(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "only this"}))
    assert TextModel.load(str(folder)).render_chat(HELLO) == "only this"


LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() }}: {% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] }} {% endgeneration %}"
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)  # as LLaVA's: pictures before the text of their message, and marks around what was generated


@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_template_like_that_of_llava(file: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    if file.endswith(".jinja"):
        (folder / file).write_text(LLAVA_TEMPLATE)
    else:
        (folder / "chat_template.jinja").unlink()
        path = folder / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, "chat_template": LLAVA_TEMPLATE}))
    image, text = pb.Part(image=pb.Image()), pb.Part(text="Which?")
    chat = check_chat(
        [
            pb.ChatMessage(role="system", parts=[pb.Part(text="Be brief.")]),
            pb.ChatMessage(role="user", parts=[text, image, image]),
            pb.ChatMessage(role="assistant", parts=[pb.Part(text="Both.")]),
            pb.ChatMessage(role="user", parts=[image, pb.Part(text="Why?")]),
        ],
        ImageLimits(IMAGE_ID, "<image>", 4, 1000),
    )
    rendered = TextModel.load(str(folder)).render_chat(chat.messages)
    assert rendered == "Be brief. USER: <image>\n<image>\nWhich? ASSISTANT: Both. USER: <image>\nWhy? ASSISTANT:"
    assert chat.fields == ["messages[1].parts[1].image", "messages[1].parts[2].image", "messages[3].parts[0].image"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file(tmp_path: Path, missing: str) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ModelFilesError, match=str(folder)):
        TextModel.load(str(folder))


def test_broken_json(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"generation_config\.json"):
        TextModel.load(str(folder))


def test_reading_a_folder_imports_no_torch(checkpoint: Path) -> None:
    program = (
        "import sys\nfrom airside.controller.gateway import server, text_model\n"
        f"text_model.TextModel.load({str(checkpoint)!r}).render_chat({HELLO!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, GenerationDefaults(1.0, 0, 1.0, 0.0)),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, GenerationDefaults(0.0, 20, 1.0, 0.0)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "min_p": 0.1}, GenerationDefaults(0.7, 0, 0.8, 0.1)),
        ({"temperature": 0.6, "top_k": -1, "top_p": None}, GenerationDefaults(0.6, 0, 1.0, 0.0)),
        ({"max_new_tokens": 40, "repetition_penalty": 1.2}, GenerationDefaults(1.0, 0, 1.0, 0.0)),
    ],
)
def test_generation_defaults(generation_config: dict[str, object], expected: GenerationDefaults) -> None:
    assert GenerationDefaults.from_checkpoint(generation_config) == expected


def test_generation_defaults_can_be_overridden() -> None:
    defaults = GenerationDefaults(0.7, 20, 0.8, 0.1).overridden({"temperature": 0, "top_k": 5})
    assert defaults == GenerationDefaults(0.0, 5, 0.8, 0.1)


def test_a_gguf_file_keeps_its_own_way_of_cutting_texts(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    for add in (writer.add_head_count, writer.add_head_count_kv, writer.add_block_count):
        add(1)
    for add in (writer.add_embedding_length, writer.add_feed_forward_length, writer.add_context_length):
        add(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(SMOLLM)
    writer.add_token_types([3] * 3 + [1] * (len(SMOLLM) - 3))
    writer.add_token_merges(["Ċ Ċ", "a b", "Ġ a"])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert TextModel.load(str(path)).encode("ab a\n\n12", False).tokens == ["ab", "Ġa", "ĊĊ", "1", "2"]


def test_a_mark_that_is_not_the_image_token(tmp_path: Path) -> None:
    """Its text is put before and after it before the text is tokenized, since newlines join."""
    folder = write_checkpoint(tmp_path)
    mark_id = SPECIAL.index("<|begin|>")
    plain = TextModel.load(str(folder))
    model = TextModel.load(str(folder), mark_id, (" [", "]\n"))
    assert (model.image_mark_id, model.image_mark) == (mark_id, "<|begin|>")
    assert model.picture_ids == {mark_id, IMAGE_ID}
    assert plain.picture_ids == {IMAGE_ID}
    for text in ("a<|begin|>b", "<|begin|><|begin|>", "a picture"):
        expected = plain.encode(text.replace("<|begin|>", " [<|begin|>]\n"), False)
        assert model.encode(text, False).ids == expected.ids


def test_a_gateway_is_told_what_stands_for_images(settings: GatewaySettings) -> None:
    mark_id = SPECIAL.index("<|begin|>")
    told = dataclasses.replace(settings, image_mark_id=mark_id, image_mark_before="(", image_mark_after=")")
    model = TextModel.of(GatewaySettings.from_json(told.to_json()))
    assert (model.image_mark_id, model.encode("<|begin|>", False).tokens) == (mark_id, ["(", "<|begin|>", ")"])


def test_image_tokens_that_no_image_brought_are_refused() -> None:
    limits = ImageLimits(6, "<begin>", 4, 1000, picture_ids=frozenset({6, 7}))
    assert check_marks("prompt", [1, 6, 2, 6], 2, limits) == [1, 3]
    with pytest.raises(RequestError, match=r"has token 7 \(its number 2\), which only images bring; write <begin>"):
        check_marks("prompt", [1, 6, 7], 1, limits)
    with pytest.raises(RequestError, match="has 1 image marks and the request has 0 images"):
        check_marks("prompt", [1, 6, 2], 0, limits)
