"""A draft layer computed from the start for every draft, with transformers' own Qwen2 in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

_PREFIX = "model.mtp_layers.0."


class MtpReference:
    """The model and the draft layer of a MiMo checkpoint."""

    def __init__(self, path: Path) -> None:
        self._model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        config: Qwen2Config = self._model.config
        self._layer = Qwen2DecoderLayer(config, 0)
        self._norms = {
            name: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
        }
        self._input = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        tensors = load_file(path / "model.safetensors")
        tensors = {name.removeprefix(_PREFIX): value for name, value in tensors.items() if name.startswith(_PREFIX)}
        for name, norm in self._norms.items():
            norm.weight.data = tensors.pop(f"{name}.weight")
        self._input.weight.data = tensors.pop("input_proj.weight")
        self._layer.load_state_dict(tensors)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """What follows `tokens`: the drafts, and the logarithm of the distribution of each, [count, vocab]."""
        embedding = self._model.model.embed_tokens
        states = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        made: list[int] = []
        distributions = []
        for _ in range(count):
            next_embeddings = embedding(torch.tensor([(tokens + made)[1:]]))
            out = self._run(states, next_embeddings)
            logits = self._model.lm_head(out[0, -1])
            distributions.append(logits.log_softmax(0))
            made.append(int(logits.argmax()))
            states = torch.cat([states, out[:, -1:]], dim=1)
        return made, torch.stack(distributions)

    def _run(self, states: Tensor, next_embeddings: Tensor) -> Tensor:
        hidden, token = self._norms["hidden_layernorm"](states), self._norms["token_layernorm"](next_embeddings)
        x = self._input(torch.cat([hidden, token], dim=-1))
        length = x.shape[1]
        rotary = self._model.model.rotary_emb(x, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        out = self._layer(x, attention_mask=mask, position_embeddings=rotary)
        normed: Tensor = self._norms["final_layernorm"](out)
        return normed
