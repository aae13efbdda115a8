"""The tokenizer of a checkpoint folder by the `tokenizers` library alone, where transformers would add nothing to it.

transformers costs 60 MB and a second. Beside reading `tokenizer.json` it adds what other files name and that one lacks,
and repairs what is known to be wrong. Whether there is anything of that kind is seen here first, and then it is left
to do it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from airside.controller.gateway.chat_template import ChatTemplate, Message

_LISTS = ("additional_special_tokens", "extra_special_tokens")
_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_PLAIN_KEYS = {
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "auto_map", "backend",
    "chat_template", "clean_up_tokenization_spaces", "errors", "is_local", "legacy", "local_files_only",
    "max_length", "model_input_names", "model_max_length", "name_or_path", "pad_to_multiple_of",
    "pad_token_type_id", "padding_side", "processor_class", "sp_model_kwargs", "spaces_between_special_tokens",
    "split_special_tokens", "stride", "tokenizer_class", "truncation_side", "truncation_strategy",
    "use_default_system_prompt",
}  # fmt: skip
"""Keys of `tokenizer_config.json` that change nothing of what is asked for here, or are looked at."""
_REPAIRED_TOKENS = 100_000
_REPAIRED_FAMILIES = ("mistral", "ministral", "pixtral", "voxtral")
"""In larger vocabularies of these, transformers repairs how texts are cut."""


class FolderTokenizer:
    """What the gateway asks of a tokenizer, under the names that transformers' have.

    Args:
        special_tokens: by name, of `tokenizer_config.json`.
        other_special_tokens: those without a name.
        chat_template: its source, or several by name.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        other_special_tokens: list[str],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._special_tokens = special_tokens
        self._other_special_tokens = other_special_tokens

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """None: no token is named as the end."""
        end = self._special_tokens.get("eos_token")
        return None if end is None else self.backend_tokenizer.token_to_id(end)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens that have been named."""
        names = dict.fromkeys([*self._special_tokens.values(), *self._other_special_tokens])
        ids = (self.backend_tokenizer.token_to_id(token) for token in names)
        return [token_id for token_id in ids if token_id is not None]

    def apply_chat_template(self, messages: list[Message], *, tokenize: bool, add_generation_prompt: bool) -> str:
        """The prompt's text; both switches have one position here.

        Raises: ValueError for no messages or no default among several templates, and whatever the template raises.
        """
        assert not tokenize
        assert add_generation_prompt
        if not messages:
            raise ValueError("a chat needs at least one message")
        return self._compiled.render(messages, self._special_tokens)

    @cached_property
    def _compiled(self) -> ChatTemplate:
        template = self.chat_template
        if isinstance(template, dict):
            if "default" not in template:
                raise ValueError(f"none of the chat templates {sorted(template)} is named default")
            template = template["default"]
        assert template is not None, "the checkpoint has no chat template"
        return ChatTemplate(template)


def read_folder_tokenizer(folder: Path) -> FolderTokenizer | None:
    """The tokenizer of a folder that has a `tokenizer.json`; None where transformers has to make it.

    Raises whatever reading and parsing the files raises.
    """
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        if (folder / "added_tokens.json").exists():
            return None
        older = _read_json(folder / "special_tokens_map.json")
        if any(key in config and key in older for key in _LISTS):
            return None
        config |= older
    tokens = _special_tokens(config)
    if tokens is None:
        return None
    named, others = tokens
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not _has_all(backend, config, named, others) or _is_repaired(backend, _read_json(folder / "config.json")):
        return None
    if backend.post_processor is None:  # as transformers leaves it: nothing before a text, nothing behind
        backend.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return FolderTokenizer(backend, named, others, _chat_template(folder, config))


def _special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]] | None:
    """Those with a name and those without; None: a key is there that this file does not know."""
    named: dict[str, str] = {}
    others: list[str] = []
    lists = [key for key in _LISTS if config.get(key)]
    if len(lists) > 1 or config.get("split_special_tokens"):
        return None
    for key, value in config.items():
        if key in _LISTS:
            found = value or []
            if isinstance(found, dict):
                named |= {name: _content(token) for name, token in found.items()}
            else:
                others += [_content(token) for token in found]
        elif key.endswith("_token") and key not in _PLAIN_KEYS:
            if value is not None:
                named[key] = _content(value)
        elif key not in _PLAIN_KEYS:
            return None
    if not all(token for token in [*named.values(), *others]):
        return None
    return named, others


def _content(token: object) -> str:
    """The text of a token, written as text or as an object; empty for anything else."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _has_all(backend: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], others: list[str]) -> bool:
    """Whether `tokenizer.json` holds every added token that other files name, and just so."""
    added = {i: {flag: getattr(token, flag) for flag in _TOKEN_FLAGS} for i, token in _added(backend).items()}
    special = {token["content"] for token in added.values() if token["special"]}
    known = {token["content"] for token in added.values()}
    if not (special.issuperset(named.values()) and known.issuperset(others)):
        return False
    if backend.padding is not None and "pad_token" not in named:
        return False
    decoder = config.get("added_tokens_decoder") or {}
    return all(isinstance(token, dict) and added.get(int(i)) == _flags(token) for i, token in decoder.items())


def _is_repaired(backend: Tokenizer, model_config: Mapping[str, Any]) -> bool:
    """Whether transformers may put another pre-tokenizer in place of the one in the file."""
    family = model_config.get("model_type") or _REPAIRED_FAMILIES[0]
    return backend.get_vocab_size() > _REPAIRED_TOKENS and family.startswith(_REPAIRED_FAMILIES)


def _added(backend: Tokenizer) -> dict[int, Any]:  # Any: AddedToken's fields have no types
    return backend.get_added_tokens_decoder()


def _flags(token: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of the library where a flag is left out."""
    special = token.get("special", False)
    return {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not special,
        "special": special,
        **{flag: token[flag] for flag in _TOKEN_FLAGS if flag in token},
    }


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Files come before the config's entry."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if templates:
        return templates["default"] if list(templates) == ["default"] else templates
    said = config.get("chat_template")
    if isinstance(said, list):
        return {entry["name"]: entry["template"] for entry in said}
    return None if said is None else str(said)


def _read_json(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
