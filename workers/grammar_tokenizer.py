"""The checkpoint's vocabulary as llguidance takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from airside.workers.model_config import ModelConfig


def load_grammar_tokenizer(path: Path, config: ModelConfig) -> LLTokenizer:
    """Reads the tokenizer of a checkpoint folder or a .gguf file, in seconds when the vocabulary is large.

    Its end tokens are those of the checkpoint and of the tokenizer, as the gateway has them for stop tokens. It is as
    wide as the logits, or wider where the tokenizer has ids that the model cannot make.

    Raises whatever the libraries raise for a tokenizer that they cannot use.
    """
    tokenizer = _open(path)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    num_ids = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    end_ids = {*config.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        end_ids.add(tokenizer.eos_token_id)
    return LLTokenizer(backend.to_str(), n_vocab=max(config.vocab_size, num_ids), eos_token=sorted(end_ids))


def _open(path: Path) -> Any:  # Any: transformers' tokenizer classes are made at run time
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_file():
        return PreTrainedTokenizerFast.from_pretrained(path.parent, local_files_only=True, gguf_file=path.name)
    if (path / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
