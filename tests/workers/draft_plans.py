"""Runs sequences by hand-made plans with the drafts that a draft head proposes for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from airside.proto.messages import StepPlan, StepResult
from tests.workers.step_plans import Track, run_tracks

Execute = Callable[[StepPlan], StepResult | None]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for what follows the first `num_known` tokens of a sequence."""

    seq_id: int
    num_known: int
    drafts: list[int]
    confidences: list[float]


class Proposals:
    """Hands the drafts in each step's result to the step after it.

    Args:
        spoil: changes drafts before they are verified.
    """

    def __init__(self, execute: Execute, spoil: Callable[[list[int]], list[int]] = lambda drafts: drafts) -> None:
        self._execute = execute
        self._spoil = spoil
        self._newest: dict[int, tuple[list[int], list[float]]] = {}
        self._pending: dict[int, tuple[int, list[int]]] = {}  # by sequence: tokens known, and drafts to be verified
        self.made: list[Proposal] = []
        self.num_verified = 0
        self.num_accepted = 0

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Executes a plan and reads the draft columns of its result."""
        result = self._execute(plan)
        assert result is not None
        sampling = np.frombuffer(plan.seq_ids, np.uint64)[np.frombuffer(plan.sampled, np.uint8) > 0].tolist()
        counts = np.frombuffer(result.num_drafts, np.int32)
        assert len(counts) == len(sampling)
        splits = np.cumsum(counts)[:-1]
        drafts = np.split(np.frombuffer(result.draft_tokens, np.int32), splits)
        confidences = np.split(np.frombuffer(result.draft_confidences, np.float32), splits)
        for seq_id, own, their in zip(sampling, drafts, confidences, strict=False):
            self._newest[seq_id] = own.tolist(), their.tolist()
        return result

    def propose(self, track: Track) -> list[int]:
        """The newest drafts for a track, once."""
        self.settle(track)
        drafts, confidences = self._newest.pop(track.seq_id, ([], []))
        if not drafts:
            return []
        self.made.append(Proposal(track.seq_id, len(track.tokens), drafts, confidences))
        spoilt = self._spoil(drafts)
        self._pending[track.seq_id] = len(track.tokens), spoilt
        return spoilt

    def settle(self, track: Track) -> None:
        """Counts how many of the drafts before are in the track by now."""
        num_known, drafts = self._pending.pop(track.seq_id, (0, []))
        num_accepted = max(0, len(track.tokens) - num_known - 1) if drafts else 0
        self.num_verified += len(drafts)
        self.num_accepted += num_accepted
        assert track.tokens[num_known : num_known + num_accepted] == drafts[:num_accepted]


def run_drafted(proposals: Proposals, tracks: list[Track], chunk: int, num_tokens: int, wanted: int) -> list[list[int]]:
    """What the tracks make, `wanted` drafts at a time."""
    for track in tracks:
        track.drafts_wanted = wanted
    made = run_tracks(proposals.execute, tracks, chunk, num_tokens, propose=proposals.propose)
    for track in tracks:
        proposals.settle(track)
    return made
