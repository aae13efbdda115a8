"""Proposes draft tokens with the layer of a model that predicts the token after the next one.

Such a layer (multi-token prediction: DeepSeek-V3 2024, arXiv 2412.19437) reads at position i the model's final state of
token i and the embedding of token i + 1, attends to its own entries up to i, and predicts token i + 2. After each step
it runs over all tokens whose successor is known by then, so that it has keys and values for the whole sequence:

    position     0    1    2    3 |  4         the step computed tokens 0 to 3 and sampled a
    token        p    q    r    s |  a
    reads        q    r    s    a |  x         at 3 it predicts what follows a: x, the first draft; for the second,
                                               it reads x and, in place of a state at 4, what it put out at 3

The last token of a prompt's chunk has to wait for the next chunk; its state is kept until then. A block that was
computed for another sequence has at its end the entry for what followed there, or for nothing. Such an entry, wrong or
missing, makes a proposal less likely to be right, and changes nothing else: what is sampled does not depend on drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import StepPlan
from airside.proto.settings import WorkerSettings
from airside.workers.draft_memory import DraftMemory
from airside.workers.draft_rows import FollowedTokens, Outcome, extend_tables, follow, read_outcome
from airside.workers.kv_cache import LayerCache, allocate_draft_cache, spare_draft_blocks
from airside.workers.model_config import ModelConfig
from airside.workers.models.causal_model import CausalModel, Proposals
from airside.workers.parallel import RankGroup
from airside.workers.placed_rows import PlacedRows, place_rows
from airside.workers.step_batch import StepBatch, column


class DraftingModel(CausalModel, Protocol):
    """A model with such a layer."""

    def draft(self, hidden: Tensor, next_ids: Tensor, batch: PlacedRows, cache: LayerCache) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden], whose `logits` are those of the token after `next_ids`.

        Args:
            hidden: the model's states after its final norm, or what this returned for the tokens before.
            next_ids: [num_tokens] int64: the token that follows each of these.
            batch: where the layer's keys and values of these tokens go, in `cache`, which is its own.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What to predict after a step, for some of the rows that sample. Arrays of [num_wishes], in the plan's order."""

    indices: NDArray[np.int64]  # among the rows that sample
    seq_ids: list[int]
    num_drafts: NDArray[np.int32]  # 0: only the distribution of the next token is wanted
    keeps: NDArray[np.bool_]  # whether distributions are kept, for the records of log-probabilities
    positions: NDArray[np.int32]  # of the last token with a successor, in the sequence
    outputs: NDArray[np.int64]  # place in the output of the first token predicted
    tables: NDArray[np.int32]  # [num_wishes, max_blocks], with room for all drafts


class DraftHead:
    """A `Drafter` of one layer, which is applied to its own output for each further draft.

    All ranks call all methods in the same order; `allocate` comes first.
    """

    def __init__(
        self,
        model: DraftingModel,
        config: ModelConfig,
        settings: WorkerSettings,
        group: RankGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._config = config
        self._settings = settings
        self._group = group
        self._dtype = dtype
        self._device = device
        self._memory = DraftMemory(settings.max_num_seqs)
        self._cache: LayerCache | None = None
        self._num_blocks = 0  # that block tables can name; the cache's spare blocks come after them

    def allocate(self, num_blocks: int) -> None:
        """Makes the head's cache; what an earlier one held, and what was kept of sequences, is lost."""
        self._cache = None
        self._cache = allocate_draft_cache(self._config, self._settings, num_blocks, self._dtype, self._device)
        self._num_blocks = num_blocks
        self._memory = DraftMemory(self._settings.max_num_seqs)

    def log_q(self, seq_id: int, position: int) -> Tensor | None:
        """[vocab] float32: log of the distribution that output token `position` was predicted from, if it was kept."""
        return self._memory.log_q(seq_id, position)

    def propose(self, plan: StepPlan, batch: StepBatch, final: Tensor, sampled: Tensor) -> Proposals | None:
        """As `Drafter` says. A distribution is kept for each row whose log-probabilities the plan asks for."""
        outcome = read_outcome(plan, batch.rows, sampled.tolist())
        self._memory.forget_log_q(outcome.seq_ids)
        tables = batch.block_tables.cpu().numpy()
        tokens, states = self._run_over_step(batch, outcome, final, tables)
        wishes = self._wishes(plan, outcome, tokens, tables)
        lasts = np.cumsum(tokens.ends - tokens.starts)[outcome.rows[wishes.indices]] - 1
        drafts, confidences = self._draft(wishes, states[self._tensor(lasts)])
        if self._group.rank != 0:
            return None
        num_drafts = np.zeros(len(outcome.rows), np.int32)
        num_drafts[wishes.indices] = wishes.num_drafts
        made = np.arange(drafts.shape[1]) < wishes.num_drafts[:, None]
        return Proposals(num_drafts, drafts[made], confidences[made])

    def _run_over_step(
        self, batch: StepBatch, outcome: Outcome, final: Tensor, tables: NDArray[np.int32]
    ) -> tuple[FollowedTokens, Tensor]:
        """Fills the cache for all tokens that have a successor: which they are, and the layer's states of them."""
        rows = batch.rows
        with_kept, kept = self._memory.take_states(rows)
        waiting = np.flatnonzero(rows.sampled == 0)
        self._memory.keep_states(rows, waiting, final[self._tensor(rows.starts[waiting + 1] - 1)])
        tokens = follow(rows, outcome, with_kept)
        some = tokens.ends > tokens.starts
        if not some.any():
            return tokens, final[:0]
        states = torch.cat([final, *kept])[self._tensor(tokens.state_ids)]
        newest = self._tensor(outcome.newest.clip(min=0))
        next_ids = torch.cat([batch.token_ids, newest])[self._tensor(tokens.next_ids)]
        return tokens, self._run(states, next_ids, tokens.starts[some], tokens.ends[some], tables[some])

    def _wishes(self, plan: StepPlan, outcome: Outcome, tokens: FollowedTokens, tables: NDArray[np.int32]) -> _Wishes:
        """The wishes of the plan for sequences that go on, as far as the longest sequence may go."""
        num_drafts, keeps = np.zeros(len(outcome.rows), np.int32), np.zeros(len(outcome.rows), np.bool_)
        positions = tokens.ends[outcome.rows] - 1
        if plan.drafts_wanted:
            room = np.minimum(self._settings.max_model_len - positions, self._settings.max_draft_tokens)
            num_drafts = np.minimum(column(plan.drafts_wanted, np.int32), room)
        if plan.logprobs:
            keeps = column(plan.logprobs, np.int32) >= 0
        indices = np.flatnonzero((outcome.newest >= 0) & (keeps | (num_drafts > 0)))
        rows = outcome.rows[indices]
        num_spare = spare_draft_blocks(self._settings)
        return _Wishes(
            indices,
            [outcome.seq_ids[index] for index in indices],
            num_drafts[indices],
            keeps[indices],
            positions[indices],
            outcome.next_outputs[indices],
            extend_tables(tables[rows], column(plan.num_blocks, np.int32)[rows], self._num_blocks, num_spare),
        )

    def _draft(self, wishes: _Wishes, states: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """[num_wishes, most drafts] each: the drafts and their probabilities on rank 0, zeros elsewhere.

        Args:
            states: [num_wishes, hidden]: the layer's, of each wish's last token with a successor.
        """
        shape = (len(wishes.indices), max(1, wishes.num_drafts.max(initial=0)))
        drafts, confidences = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        going = np.arange(shape[0])  # the wishes that `states` are of
        for ahead in range(shape[1] if len(going) else 0):
            log_q = self._distributions(wishes, going, ahead, states)
            best = None if log_q is None else log_q.max(dim=1)
            if best is not None:
                drafts[going, ahead] = best.indices.cpu()
                confidences[going, ahead] = best.values.exp().cpu()
            more = np.flatnonzero(wishes.num_drafts[going] > ahead + 1)
            if len(more) == 0:
                break
            going = going[more]
            own = None if best is None else drafts[going, ahead]
            shared = self._group.share_tokens(own, len(going), self._device)
            assert shared is not None
            at = wishes.positions[going] + 1 + ahead
            next_ids = self._tensor(shared.astype(np.int64))
            states = self._run(states[self._tensor(more)], next_ids, at, at + 1, wishes.tables[going])
        return drafts, confidences

    def _distributions(self, wishes: _Wishes, going: NDArray[np.int64], ahead: int, states: Tensor) -> Tensor | None:
        """[len(going), vocab] on rank 0: log-probabilities of what follows, which are kept where that was asked for."""
        logits = self._model.logits(states)
        if logits is None:
            return None
        log_q = logits.log_softmax(dim=1)
        for index in np.flatnonzero(wishes.keeps[going]):
            wish = going[index]
            self._memory.keep_log_q(wishes.seq_ids[wish], int(wishes.outputs[wish]) + ahead, log_q[index].clone())
        return log_q

    def _run(
        self,
        states: Tensor,
        next_ids: Tensor,
        starts: NDArray[np.int32],
        ends: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> Tensor:
        """The layer's states of positions `[starts[i], ends[i])` of each row; writes their keys and values."""
        assert self._cache is not None, "a step came before the KV setup"
        placed = place_rows(starts, ends, tables, self._settings.block_size, self._device)
        return self._model.draft(states, next_ids, placed, self._cache)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
