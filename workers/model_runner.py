"""Executes one step plan on this rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from airside.proto.messages import PixelsRef, StepPlan
from airside.proto.settings import WorkerSettings
from airside.workers.image_embeddings import ImageEmbeddings
from airside.workers.kv_cache import LayerCache, allocate_kv_cache, count_kv_blocks
from airside.workers.model_config import ModelConfig
from airside.workers.models.causal_model import CausalModel
from airside.workers.pixels import PixelArena
from airside.workers.sampler import sample
from airside.workers.step_batch import build_sampling_batch, build_step_batch


class ModelRunner:
    """A loaded model with its KV cache. Keeps nothing about sequences between steps but KV blocks and embeddings."""

    def __init__(
        self,
        model: CausalModel,
        config: ModelConfig,
        settings: WorkerSettings,
        dtype: torch.dtype,
        device: torch.device,
        arena: PixelArena,
    ) -> None:
        self._model = model
        self._config = config
        self._settings = settings
        self._dtype = dtype
        self._device = device
        self._arena = arena
        self._images = ImageEmbeddings(self._encode)
        self._cache: list[LayerCache] = []  # empty until `allocate`

    def count_kv_blocks(self) -> int:
        """How many KV blocks fit on this rank. Raises MemoryError when none does."""
        return count_kv_blocks(self._config, self._settings, self._dtype, self._device)

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV cache; what an earlier one held is lost."""
        self._cache = []
        self._cache = allocate_kv_cache(self._config, self._settings, num_blocks, self._dtype, self._device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> bytes | None:
        """The sampled tokens as i32 bytes on rank 0 (-1: the row gave none a probability), None on the others."""
        assert self._cache, "a step plan came before the KV setup"
        batch = build_step_batch(plan, self._settings.block_size, len(self._cache[0].k), self._device)
        hidden = self._embed(plan, batch.token_ids)
        final = self._model.forward(hidden, batch, self._cache)
        if len(final) == 0:
            return b"" if self._settings.rank == 0 else None
        logits = self._model.logits(final)
        if logits is None:
            return None
        tokens = sample(logits, build_sampling_batch(plan, self._device))
        return tokens.cpu().numpy().astype(np.int32, copy=False).tobytes()

    def _embed(self, plan: StepPlan, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden]; image tokens are the pictures' embeddings, in order."""
        hidden = self._model.embed(token_ids)
        if not plan.images:
            return hidden
        assert self._config.image_token_id is not None, "a text model was given pictures"
        places = (token_ids == self._config.image_token_id).nonzero().squeeze(1)
        rows = self._images.rows(plan.images)
        if len(places) != len(rows):
            raise ValueError(f"step {plan.step_id} has {len(places)} image tokens and {len(rows)} image embeddings")
        return hidden.index_copy_(0, places, rows)

    def _encode(self, pixels: PixelsRef) -> Tensor:
        return self._model.encode_image(self._arena.read(pixels, self._device))
