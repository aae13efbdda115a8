"""Executes one step plan on this rank."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import PixelsRef, StepPlan, StepResult
from airside.proto.settings import WorkerSettings
from airside.workers.axis_positions import AxisPositions
from airside.workers.grammars import Grammars
from airside.workers.image_embeddings import ImageEmbeddings
from airside.workers.kv_cache import LayerCache, allocate_kv_cache, count_kv_blocks
from airside.workers.logprobs import prompt_records
from airside.workers.model_config import ModelConfig
from airside.workers.models.causal_model import CausalModel, Drafter
from airside.workers.ops import Program
from airside.workers.parallel import RankGroup
from airside.workers.picture_sights import with_sights
from airside.workers.pixels import PixelArena
from airside.workers.sampler import NOTHING_SAMPLED, Sampled, Sampler
from airside.workers.state_slots import count_state_slots
from airside.workers.step_batch import Rows, StepBatch, build_step_batch, needs_sampled_before, read_rows
from airside.workers.step_program import StepProgram


class _StepBefore:
    """The step that was executed last: a placeholder of the next one may name what it sampled.

    Rank 0 knows that; the others are told when somebody asks, which all ranks do together.
    """

    def __init__(self, step_id: int, num_positions: int, tokens: NDArray[np.int32] | None) -> None:
        self.step_id = step_id
        self._num_positions = num_positions
        self._tokens = tokens
        self._is_shared = False

    def shared(self, group: RankGroup, device: torch.device) -> NDArray[np.int32]:
        """[num_positions] int32: what it sampled, on all ranks."""
        if not self._is_shared:
            self._tokens = group.share_tokens(self._tokens, self._num_positions, device)
            self._is_shared = True
        assert self._tokens is not None
        return self._tokens


class ModelRunner:
    """A loaded model with its KV cache.

    Keeps between steps: KV blocks, picture embeddings, the tokens sampled last, and on rank 0 what the sampler must
    know of opened and structured sequences.

    Args:
        grammars: on rank 0, those of structured sequences.
        drafter: the model's draft head, on all ranks or on none.
    """

    def __init__(
        self,
        model: CausalModel,
        config: ModelConfig,
        settings: WorkerSettings,
        dtype: torch.dtype,
        device: torch.device,
        arena: PixelArena,
        group: RankGroup,
        *,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._settings = settings
        self._dtype = dtype
        self._device = device
        self._arena = arena
        self._group = group
        self.grammars = grammars
        self._drafter = drafter
        log_q = None if drafter is None else drafter.log_q
        self._sampler = Sampler(grammars, log_q, device, config.picture_ids) if group.rank == 0 else None
        self._images = ImageEmbeddings(self._encode, settings.embedding_cache_bytes)
        self._axis_positions = None if config.rope_axes is None else AxisPositions(config, arena)
        self._cache: list[LayerCache] = []  # empty until `allocate`
        self._program: StepProgram | None = None  # likewise; None: the model's steps cannot be recorded
        self._num_blocks = 0
        self._before: _StepBefore | None = None

    def count_kv_blocks(self) -> int:
        """How many KV blocks fit on this rank. Raises MemoryError when none does."""
        return count_kv_blocks(self._config, self._settings, self._dtype, self._device)

    @property
    def num_state_slots(self) -> int:
        """How many sequences' fixed-size state this rank holds; 0: the model has none."""
        return count_state_slots(self._config, self._settings)

    @property
    def program(self) -> Program | None:
        """The operators of a step, for whoever measures them; None: steps are not recorded."""
        return None if self._program is None else self._program.program

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV cache and the states; what earlier ones held is lost."""
        self._program, self._cache = None, []
        self._cache = allocate_kv_cache(self._config, self._settings, num_blocks, self._dtype, self._device)
        self._num_blocks = num_blocks
        self._model.allocate_states(self.num_state_slots, num_blocks, self._settings.max_draft_tokens)
        if self._drafter is not None:
            self._drafter.allocate(num_blocks)
        self._program = StepProgram.record(self._model, self._config, self._settings, self._dtype, self._cache)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """What the step came to, on rank 0; None on the others. Plans are executed in the order of their ids."""
        with torch.inference_mode():  # as a decorator it takes twice as long
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult | None:
        assert self._num_blocks, "a step plan came before the KV setup"
        started_s = time.perf_counter()
        rows = read_rows(plan, self._sampled_before(plan))
        has_drafter = self._drafter is not None
        batch = build_step_batch(
            plan, rows, self._settings.block_size, self._num_blocks, self._device, all_wanted=has_drafter
        )
        if self._axis_positions is not None and plan.images:
            batch = self._axis_positions.placed(plan, batch)
        if self._config.pictures.num_atomic and plan.images:
            assert self._config.image_token_id is not None
            batch = with_sights(batch, plan.images, self._config.image_token_id)
        final = self._forward(self._embed(plan, batch.token_ids), batch)
        # With a draft head all tokens are wanted; those that get logits are a part of them.
        scored = final[torch.cat((batch.sampled, batch.prompt_scored))] if has_drafter else final
        num_positions = batch.host.num_positions
        sampled = self._sample(plan, rows, scored[:num_positions] if plan.prompt_logprobs else scored)
        prompt_logprobs = self._score_prompts(plan, scored[num_positions:]) if plan.prompt_logprobs else b""
        self._before = _StepBefore(plan.step_id, num_positions, None if sampled is None else sampled.tokens)
        proposals = self._propose(plan, batch, final)
        self._images.encode(plan.ahead)
        encoded = self._images.take_news()  # on all ranks, or it would add up on those that do not answer
        if sampled is None:
            return None
        return StepResult(
            step_id=plan.step_id,
            sampled=sampled.tokens.tobytes(),
            execute_s=time.perf_counter() - started_s,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            encoded=encoded,
            **proposals,
        )

    def _forward(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """[len(batch.wanted), hidden]: final states; they last until the next step."""
        if self._program is not None and self._program.fits(batch):
            return self._program.run(hidden, batch)
        return self._model.forward(hidden, batch, self._cache)

    def _sample(self, plan: StepPlan, rows: Rows, final: Tensor) -> Sampled | None:
        """None on ranks that do not sample. `final`: [num_positions, hidden]."""
        if self._sampler is not None:
            self._sampler.begin(plan)
        logits = self._model.logits(final) if len(final) else None
        if self._sampler is None:
            return None
        return NOTHING_SAMPLED if logits is None else self._sampler.sample(plan, rows, logits)

    def _score_prompts(self, plan: StepPlan, final: Tensor) -> bytes:
        return prompt_records(plan.prompt_logprobs, final, self._model.logits, self._config.vocab_size)

    def _propose(self, plan: StepPlan, batch: StepBatch, final: Tensor) -> dict[str, bytes]:
        """The draft columns of `StepResult`, if there is a draft head and this is rank 0."""
        if self._drafter is None:
            return {}
        assert self._before is not None
        sampled = torch.from_numpy(self._before.shared(self._group, self._device))
        proposals = self._drafter.propose(plan, batch, final, sampled)
        if proposals is None:
            return {}
        return {
            "num_drafts": proposals.num_drafts.tobytes(),
            "draft_tokens": proposals.draft_tokens.tobytes(),
            "draft_confidences": proposals.draft_confidences.tobytes(),
        }

    def _sampled_before(self, plan: StepPlan) -> NDArray[np.int32] | None:
        """What the step before sampled, if the plan refers to it."""
        if not needs_sampled_before(plan):
            return None
        before = self._before
        assert before is not None, f"step {plan.step_id} refers to a step before the first"
        assert before.step_id == plan.step_id - 1, f"step {plan.step_id} came after step {before.step_id}"
        return before.shared(self._group, self._device)

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
