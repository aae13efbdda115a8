"""A folder's tokenizer without transformers: the same in everything that is asked of it, or left to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from airside.controller.gateway.folder_tokenizer import FolderTokenizer, read_folder_tokenizer
from airside.controller.gateway.text_model import TextModel
from tests.checkpoints import make_tokenizer
from tests.gateway.tiny_checkpoint import SPECIAL, byte_level_tokenizer, write_checkpoint

TEXTS = ["", "the quick brown fox", "  two  spaces\n\n\n東 京 [tool]<|end|>x<image>", "naïve 🙂\x00", "<|begin|>a<unk>"]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "<b> & \"quotes\" 'single' é"},
        {"role": "user", "content": [{"type": "text", "text": "Which?"}, {"type": "image"}], "name": None},
        {"role": "assistant", "content": ""},
    ],
]
TEMPLATES = {
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "blocks": "  {% if true %}\nx\n  {% endif %}\n{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "defined": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ unknown is defined }}"
    "{% for m in messages %}{{ m.keys() | list }}{% endfor %}{{ add_generation_prompt }}",
    "names": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }} \n{% endgeneration %}\n{{ x }}"
    "{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "named": "{{ image_token }}{{ boi }}",
}  # fmt: skip
DECODER = {
    str(i): {
        "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True
    }
    for i, token in enumerate(SPECIAL)
}  # fmt: skip


def folder_with(folder: Path, config: dict[str, Any], template: str = TEMPLATES["tokens"]) -> Path:
    write_checkpoint(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"} | config)
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def assert_same(folder: Path) -> FolderTokenizer:
    ours = read_folder_tokenizer(folder)
    assert ours is not None
    theirs = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (len(ours), ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        for special in (True, False):
            ids = ours.backend_tokenizer.encode(text, add_special_tokens=special).ids
            assert ids == theirs.backend_tokenizer.encode(text, add_special_tokens=special).ids
    if theirs.chat_template is not None:
        for chat in CHATS:
            switches = {"tokenize": False, "add_generation_prompt": True}
            assert ours.apply_chat_template(chat, **switches) == theirs.apply_chat_template(chat, **switches)
    return ours


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_say_the_same(tmp_path: Path, template: str) -> None:
    named = {"image_token": "<image>", "extra_special_tokens": {"boi": "<|begin|>"}}
    assert_same(folder_with(tmp_path, named, template))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"added_tokens_decoder": DECODER, "add_bos_token": True, "split_special_tokens": False, "unk_token": None},
        {"additional_special_tokens": ["<image>", "[tool]"], "tokenizer_class": "LlamaTokenizer", "legacy": False},
        {"eos_token": {"__type": "AddedToken", **DECODER["2"]}, "extra_special_tokens": ["<image>"]},
        {"eos_token": None, "model_max_length": 10**30},
    ],
    ids=["plain", "decoder", "additional", "objects", "no_end"],
)
def test_configs_of_many_kinds(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_same(folder_with(tmp_path, config))


def test_special_tokens_of_the_older_file_come_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"eos_token": "<|begin|>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": DECODER["2"], "pad_token": "<unk>"}))
    assert assert_same(folder).eos_token_id == 2
    folder_with(tmp_path, {"eos_token": "<|begin|>", "added_tokens_decoder": DECODER})
    assert assert_same(folder).eos_token_id == 1


def test_a_post_processor_and_a_padding_of_the_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"pad_token": "<unk>"})
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", 1)])
    backend.enable_padding(pad_id=0, pad_token="<unk>", length=8)
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    assert_same(folder)
    assert TextModel.load(str(folder)).encode("a", True).tokens == ["<|begin|>", "a"]


def test_templates_with_names(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    assert_same(folder)
    (folder / "chat_template.jinja").unlink()
    entries = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "{{ documents }}"}]
    folder_with(tmp_path, {"chat_template": entries})
    (folder / "chat_template.jinja").unlink()
    (more / "tool_use.jinja").unlink()
    assert assert_same(folder).chat_template == {"default": "plain", "rag": "{{ documents }}"}


def test_a_folder_of_transformers_own_making(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    assert_same(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"pad_token": "<|new|>"},
        {"eos_token": "[tool]"},  # there, but no special token
        {"extra_special_tokens": ["<|new|>"]},
        {"added_tokens_decoder": {**DECODER, "3": {**DECODER["3"], "lstrip": True}}},
        {"added_tokens_decoder": {"1": DECODER["2"]}},
        {"split_special_tokens": True},
        {"fix_mistral_regex": True},
        {"additional_special_tokens": ["<image>"], "extra_special_tokens": ["<unk>"]},
    ],
)
def test_what_is_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = folder_with(tmp_path, config)
    assert read_folder_tokenizer(folder) is None
    assert isinstance(TextModel.load(str(folder))._chat, PreTrainedTokenizerFast)


def test_older_ways_to_name_added_tokens_are_left_to_transformers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "added_tokens.json").write_text('{"<|new|>": 700}')
    assert read_folder_tokenizer(folder) is None


@pytest.mark.parametrize(("family", "is_left"), [("mistral3", True), (None, True), ("llama", False)])
def test_large_vocabularies_of_mistral_are_left_to_transformers(
    tmp_path: Path, family: str | None, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    assert read_folder_tokenizer(folder) is not None
    monkeypatch.setattr("airside.controller.gateway.folder_tokenizer._REPAIRED_TOKENS", 100)
    assert (read_folder_tokenizer(folder) is None) == is_left


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('no') }}", TemplateError),
        ("{% set ns = namespace(_x=1) %}", SecurityError),
        ("{% set ns = namespace(x=1) %}{% set ns.__class__ = 2 %}", SecurityError),
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ dict.__init__ }}{{ dict.mro() }}", TemplateError),
        ("{% if %}", TemplateError),
    ],
)
def test_templates_may_do_no_more_than_under_transformers(
    tmp_path: Path, template: str, error: type[Exception]
) -> None:
    ours = read_folder_tokenizer(folder_with(tmp_path, {}, template))
    assert ours is not None
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    for tokenizer in (ours, theirs):
        with pytest.raises(error):
            tokenizer.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True)


def test_tokens_beside_the_vocabulary(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken("<|late|>", special=True, lstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    assert_same(folder)
