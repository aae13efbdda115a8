"""The text side of a checkpoint: tokenizer, chat template, end tokens, image mark, sampling defaults.

A folder with a `tokenizer.json` is read as it stands: by `folder_tokenizer.py` if that file says all there is to it,
else through transformers' generic tokenizer class, which takes 60 MB more and no torch. Anything else (a sentencepiece
model, a `.gguf` file) needs transformers' converters, which import torch: 3 s and 300 MB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from airside.controller.gateway.detokenizer import Detokenizer, Vocabulary
from airside.controller.gateway.errors import ModelFilesError, invalid
from airside.controller.gateway.folder_tokenizer import read_folder_tokenizer
from airside.controller.gateway.generation_defaults import GenerationDefaults
from airside.proto.settings import GatewaySettings

ChatMessages = Sequence[Mapping[str, object]]
"""What chat templates take: `role`, and `content` as a text or as a list of typed parts."""


class TextModel:
    """Text to token ids and back, for one checkpoint.

    Args:
        tokenizer: a `FolderTokenizer`, or transformers' with a `tokenizers` backend (Any: classes made at run time).
        config: `config.json`, or nothing for a .gguf file.
        generation_config: `generation_config.json`, or nothing.
        image_mark_id: what stands for an image in a prompt; None: the config's image token.
        mark_text: what a prompt's text gets before and after each mark, so that it is tokenized with that.

    Raises:
        ModelFilesError: the files contradict each other.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        image_mark_id: int | None = None,
        mark_text: tuple[str, str] = ("", ""),
    ) -> None:
        self._chat = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        text_config = config.get("text_config") or config
        self.vocab_size: int = text_config.get("vocab_size") or config.get("vocab_size") or len(tokenizer)
        self.end_ids = _end_ids(tokenizer, config, generation_config)
        image_token_id = config.get("image_token_id", config.get("image_token_index"))
        self.image_mark_id = image_token_id if image_mark_id is None else image_mark_id
        self.image_mark = _image_mark(self._backend, self.image_mark_id)
        self.picture_ids = frozenset({image_token_id, self.image_mark_id} - {None})
        """Tokens that stand for pictures, in prompts or in the model, which never makes them."""
        self._mark_with_text = self.image_mark.join(mark_text)
        self.defaults = GenerationDefaults.from_checkpoint(generation_config)
        special = [i for i, token in self._backend.get_added_tokens_decoder().items() if token.special]
        self._vocabulary = Vocabulary(self._backend, {*special, *tokenizer.all_special_ids, *self.end_ids})
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.token_chars_max = max((len(token) for token in vocabulary), default=1)
        self.num_token_ids = max(vocabulary.values(), default=-1) + 1
        """Ids that the tokenizer has a use for: below this. May be fewer or more than the model's logits."""

    @classmethod
    def load(cls, model_path: str, image_mark_id: int | None = None, mark_text: tuple[str, str] = ("", "")) -> Self:
        """Reads a checkpoint folder or a .gguf file; the other arguments are the class's. Raises ModelFilesError."""
        path = Path(model_path)
        if path.is_file():
            return cls(_load_tokenizer(path.parent, gguf_file=path.name), {}, {})
        config = _read_json(path / "config.json")
        if config is None:
            raise ModelFilesError(f"{path} has no config.json: it is not a checkpoint folder")
        tokenizer = _load_tokenizer(path)
        processor_template = _read_json(path / "chat_template.json") or {}
        if "chat_template" in processor_template:
            tokenizer.chat_template = processor_template["chat_template"]
        return cls(tokenizer, config, _read_json(path / "generation_config.json") or {}, image_mark_id, mark_text)

    @classmethod
    def of(cls, settings: GatewaySettings) -> Self:
        """The model of a gateway. Raises ModelFilesError."""
        mark_text = settings.image_mark_before, settings.image_mark_after
        return cls.load(settings.model_path, settings.image_mark_id, mark_text)

    @property
    def accepts_images(self) -> bool:
        """Whether a prompt may have image marks."""
        return self.image_mark_id is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be called."""
        return self._chat.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """Ids and tokens of a text; special tokens spelled in it are taken as such. Safe in any thread."""
        if self._mark_with_text != self.image_mark:
            text = text.replace(self.image_mark, self._mark_with_text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, messages: ChatMessages) -> str:
        """The prompt that asks for the assistant's next message. It has its own begin tokens.

        Raises:
            RequestError: the template refuses these messages, e.g. their order of roles.
        """
        try:
            prompt: str = self._chat.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # Templates raise on purpose, and trip over content they were not written for.
            raise invalid("messages", f"the checkpoint's chat template refuses them: {error}") from error
        return prompt

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        return self._vocabulary.detokenizer()

    def tokenizer_json(self) -> str:
        """The tokenizer as the content of a `tokenizer.json`, with all added tokens. Slow with a large vocabulary."""
        return self._backend.to_str()

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for inside a text, which may be part of a character; of a special token, its name."""
        return self._vocabulary.token_bytes(token_id)


def _load_tokenizer(folder: Path, gguf_file: str | None = None) -> Any:  # Any: transformers' own classes
    try:
        has_tokenizer_json = (folder / "tokenizer.json").is_file()
        if gguf_file is None and has_tokenizer_json and (plain := read_folder_tokenizer(folder)) is not None:
            return plain
        if has_tokenizer_json or gguf_file is not None:
            from transformers import PreTrainedTokenizerFast

            from airside.controller.gateway.gguf_tokenizer import restore_pre_tokenizer

            if gguf_file is None:
                return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, gguf_file=gguf_file)
            restore_pre_tokenizer(tokenizer.backend_tokenizer, folder / gguf_file)
            return tokenizer
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The library raises whatever its parsers raise, bare Exceptions among them.
        raise ModelFilesError(f"no tokenizer can be read from {gguf_file or folder}: {error}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return content


def _end_ids(tokenizer: Any, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> list[int]:
    """All ids that end a text: those of the generation config, else of the config, and the tokenizer's own."""
    text_config = config.get("text_config") or {}
    said = [source.get("eos_token_id") for source in (generation_config, config, text_config)]
    chosen: int | list[int] = next((ids for ids in said if ids is not None), [])
    ids = {*chosen} if isinstance(chosen, list) else {chosen}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids)


def _image_mark(tokenizer: Tokenizer, mark_id: int | None) -> str:
    """Text of the token that marks an image's place, or "" for a text model."""
    if mark_id is None:
        return ""
    mark = tokenizer.id_to_token(mark_id)
    if mark is None:
        raise ModelFilesError(
            f"config.json says that token {mark_id} marks images, but the tokenizer has no such token"
        )
    return mark
