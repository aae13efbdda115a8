"""The text part of a checkpoint as a checkpoint of its own, for engines that know text models only.

`python benchmarks/text_model.py demo FOLDER`
"""

from __future__ import annotations

import sys
from pathlib import Path

from airside.cluster.model_source import resolve


def write_text_model(source: str, folder: Path) -> None:
    """Writes weights in bfloat16, config and tokenizer; a text model is written as it is. Raises ModelSourceError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    checkpoint = resolve(source, lambda line: print(line, file=sys.stderr))
    config = AutoConfig.from_pretrained(checkpoint)
    if getattr(config, "vision_config", None) is None:
        text = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    else:
        whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16)
        with torch.device("meta"):  # the parts are put in below; nothing is allocated twice
            text = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.bfloat16)
        text.model = whole.model.text_model
        text.lm_head = whole.lm_head
    text.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


if __name__ == "__main__":
    write_text_model(sys.argv[1], Path(sys.argv[2]))
