"""Workers in a few lines: a model whose tokens are a function of all tokens before them, and its KV pool.

The KV of a position is a hash of everything up to it, so that a block with other content than the row needs shows at
once, and a wrong token in the next one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from airside import _core
from tests.engine.columns import IMAGE, PlanRow, f32, i32, plan_rows

VOCABULARY = 12
"""Small, so that stop tokens, the image token and repetitions come up often."""


def root(salt: str = "") -> int:
    """The hash before the first token."""
    return zlib.crc32(salt.encode())


def extend(before: int, token: int, picture: tuple[object, int] | None = None) -> int:
    """The hash after one more token; of an image token its picture and place in it count."""
    return zlib.crc32(repr(picture or token).encode(), before)


def next_token(after: int, last: int, banned: list[int]) -> int:
    """What the model makes; mostly a function of the last token alone, so that runs of tokens come again."""
    token = after % VOCABULARY if after % 3 == 0 else (last * 5 + 3) % VOCABULARY
    while token in (*banned, IMAGE):
        token = (token + 1) % VOCABULARY
    return token


def continuation(prompt: list[int], count: int, salt: str = "") -> list[int]:
    """The next tokens of a prompt without pictures, when it is computed alone."""
    after = root(salt)
    for token in prompt:
        after = extend(after, token)
    made: list[int] = []
    last = prompt[-1]
    for _ in range(count):
        last = next_token(after, last, [])
        after = extend(after, last)
        made.append(last)
    return made


@dataclass
class Answer:
    """What the workers say of one step."""

    step_id: int
    sampled: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    draft_tokens: list[int] = field(default_factory=list)

    def apply_to(self, engine: _core.Engine, now: float) -> None:
        """Closes the step."""
        drafted = any(self.num_drafts)
        engine.apply(
            self.step_id,
            i32(self.sampled),
            now,
            num_drafts=i32(self.num_drafts) if drafted else b"",
            draft_tokens=i32(self.draft_tokens),
            draft_confidences=f32([0.9] * len(self.draft_tokens)),
        )


class FakeModel:
    """Computes plans in the order in which they are given. Every method asserts what a worker relies on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kv: dict[tuple[int, int], int] = {}
        self._last_step = -1
        self._last_sampled: list[int] = []
        self._salts: dict[int, str] = {}
        self._pictures: dict[int, list[object]] = {}

    def introduce(self, seq_id: int, salt: str = "", pictures: list[object] | None = None) -> None:
        """`pictures`: something equal for equal pictures, for each of the sequence."""
        self._salts[seq_id] = salt
        self._pictures[seq_id] = pictures or []

    def restart(self) -> None:
        """All KV is lost."""
        self._kv.clear()
        self._last_step = -1

    def execute(self, plan: _core.StepPlan, known: dict[int, list[int]] | None = None) -> Answer:
        """Computes a plan. `known`: hashes of a sequence's tokens, which its row must find in its blocks."""
        answer = Answer(plan.step_id)
        pictures = iter([(s, i, n) for s, i, start, count in plan.images for n in range(start, start + count)])
        for row in plan_rows(plan):
            hashes = [self._read(row, (known or {}).get(row.seq_id, []))]
            tokens = [self._resolve(plan, token) for token in row.tokens]
            for position, token in enumerate(tokens, row.begin):
                picture = None
                if token == IMAGE:
                    seq_id, image, place = next(pictures)
                    assert seq_id == row.seq_id
                    picture = (self._pictures[seq_id][image], place)
                hashes.append(extend(hashes[-1], token, picture))
                self._kv[self._slot(row, position)] = hashes[-1]
            if row.num_sampled:
                self._sample(row, tokens, hashes, answer)
        assert next(pictures, None) is None, "a picture that no token needs"
        self._last_step, self._last_sampled = plan.step_id, answer.sampled
        return answer

    def _slot(self, row: PlanRow, position: int) -> tuple[int, int]:
        return row.blocks[position // self._block_size], position % self._block_size

    def _read(self, row: PlanRow, known: list[int]) -> int:
        expected = known[: row.begin]
        found = [self._kv.get(self._slot(row, position)) for position in range(len(expected))]
        assert found == expected, "its KV is not where it was"
        before = root(self._salts.get(row.seq_id, ""))
        if row.begin:
            before = self._kv[self._slot(row, row.begin - 1)]
        return before

    def _resolve(self, plan: _core.StepPlan, token: int) -> int:
        if token >= 0:
            return token
        assert plan.step_id == self._last_step + 1, "a placeholder for a step that is not the one before"
        return self._last_sampled[-1 - token]

    def _sample(self, row: PlanRow, tokens: list[int], hashes: list[int], answer: Answer) -> None:
        accepted: list[int] = []
        for i, (banned, forced) in enumerate(zip(row.banned, row.forced, strict=True)):
            at = len(tokens) - row.num_sampled + i
            made = forced if forced >= 0 else next_token(hashes[at + 1], tokens[at], banned)
            answer.sampled.append(made)
            if len(accepted) == i and all(a == d for a, d in zip(accepted, row.drafts, strict=False)):
                accepted.append(made)
        after = hashes[len(tokens) - row.num_sampled + len(accepted)]
        answer.num_drafts.append(row.drafts_wanted)
        last = accepted[-1]
        for i in range(row.drafts_wanted):
            after = extend(after, last)
            last = next_token(after, last, [])
            # Every other proposal ends in a mistake.
            is_wrong = i == row.drafts_wanted - 1 and plan_is_odd(answer.step_id)
            answer.draft_tokens.append((last + 1) % VOCABULARY if is_wrong else last)


def plan_is_odd(step_id: int) -> bool:
    """Whether the draft head errs in this step."""
    return step_id % 2 == 1
