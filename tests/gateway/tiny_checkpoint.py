"""The text side of a checkpoint, a few hundred tokens large, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.byte_level import train_byte_level

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a picture of two red circles and one blue square",
    "naïve café, déjà vu, 東京は大きい, 日本語, 🙂🚀 emoji",
]
SPECIAL = ["<unk>", "<|begin|>", "<|end|>", "<image>"]
IMAGE_ID = SPECIAL.index("<image>")
END_ID = SPECIAL.index("<|end|>")
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}<|begin|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
GREEDY = {"eos_token_id": [END_ID], "do_sample": False}


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Trained on `CORPUS`."""
    tokenizer = train_byte_level(CORPUS * 4, SPECIAL, vocab_size)
    tokenizer.add_tokens([AddedToken("[tool]", special=False), AddedToken("東 京", special=False)])
    return tokenizer


def write_checkpoint(folder: Path, images: bool = True, generation_config: dict[str, object] | None = None) -> Path:
    """A folder with everything that the gateway reads, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    text_config = {"vocab_size": size, "eos_token_id": END_ID}
    config = {"image_token_id": IMAGE_ID, "text_config": text_config} if images else text_config
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation_config if generation_config is not None else GREEDY)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    (folder / "chat_template.jinja").write_text(IMAGE_TEMPLATE if images else TEXT_TEMPLATE)
    return folder


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content))
