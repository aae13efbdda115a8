"""Chats without pictures, in the untrained text model's own words: what the training must not change."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from airside.cluster.demo_model.training.text_model import Adapter, TextModel

PROMPTS = Path(__file__).parent / "chat_prompts.txt"
REPLY_TOKENS = 40


class Chats:
    """Token ids of chats after the system prompt, and the loss of changing them.

    Args:
        prompt: the system prompt's token ids, `<|im_start|>user` included.
        chats: what follows it, a list of token ids each.
    """

    def __init__(self, model: TextModel, prompt: list[int], chats: list[list[int]]) -> None:
        self._model = model
        self._prompt = prompt
        self._chats = chats

    def loss(self, adapter: Adapter, chosen: list[int]) -> Tensor:
        """Kullback-Leibler divergence from the untrained model, in nats per token, over the chosen chats."""
        chats = [self._chats[i % len(self._chats)] for i in chosen]
        length = max(len(chat) for chat in chats)
        ids = torch.tensor([chat + [0] * (length - len(chat)) for chat in chats])
        real = torch.tensor([[True] * len(chat) + [False] * (length - len(chat)) for chat in chats])
        with torch.no_grad():
            before = self._model.logits(self._hidden(ids, None)[real]).log_softmax(-1)
        after = self._model.logits(self._hidden(ids, adapter)[real]).log_softmax(-1)
        return (before.exp() * (before - after)).sum(-1).mean()

    def _hidden(self, ids: Tensor, adapter: Adapter | None) -> Tensor:
        rows, length = ids.shape
        positions = torch.arange(len(self._prompt), len(self._prompt) + length).expand(rows, -1)
        visible = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, -1, -1)
        return self._model(self._model.embedding[ids], positions, visible, self._prompt, adapter)


@torch.inference_mode()
def replied(folder: Path, prompt: list[int], questions: list[str], reply_tokens: int = REPLY_TOKENS) -> list[list[int]]:
    """Each question's and its sampled reply's token ids, without the prompt.

    Args:
        folder: the assembled checkpoint that has not been trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = [f"{tokenizer.decode(prompt)}{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    inputs = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    made = model.generate(**inputs, max_new_tokens=reply_tokens, do_sample=True, top_k=0)
    chats = []
    for ids, mask in zip(made, inputs["attention_mask"], strict=True):
        whole = ids[int((mask == 0).sum()) :].tolist()
        end = inputs["input_ids"].shape[1] - int((mask == 0).sum())
        reply = whole[end:]
        if model.config.eos_token_id in reply:
            reply = reply[: reply.index(model.config.eos_token_id) + 1]
        chats.append(whole[len(prompt) : end] + reply)
    return chats
