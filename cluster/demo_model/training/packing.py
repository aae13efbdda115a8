"""Questions about pictures as rows of tokens: questions about the same pictures share the pictures' tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from airside.cluster.demo_model.training.questions import Question
from airside.cluster.demo_model.training.tower import TOKENS

IMAGE, FAKE, GLOBAL = 3, 4, 6
PICTURE = [FAKE, GLOBAL, *[IMAGE] * TOKENS, FAKE]
ROW_TOKENS = 128
SYSTEMS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
)


@dataclass(frozen=True, slots=True)
class Group:
    """Questions about the same one or two pictures, which are indices into a step's pictures."""

    pictures: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Groups laid into rows; `[rows, length]` each, visible `[rows, length, length]`.

        row:  |picture 3      |question a|question b|picture 5      |question c|...
        each question sees the shared prompt, its group's pictures and itself

    targets: the token to say next, or -1. question: which of all questions a token belongs to, or -1. pictures: the
    step's picture behind each run of image tokens, in the order in which they lie in `ids`.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    question: Tensor
    visible: Tensor
    pictures: list[int]
    questions: list[Question]


class Packer:
    """Lays groups into rows.

    Args:
        tokenizer: the checkpoint's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which special tokens count as such."""
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def prompt(self, system: str) -> list[int]:
        """Everything before a first user message's content, as the chat template writes it."""
        return self.encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")

    def pack(self, groups: list[Group], prompt_tokens: int) -> Rows:
        """Groups packed into rows, none cut."""
        rows: list[_Row] = []
        questions: list[Question] = []
        sized = sorted(((self._length(group), i) for i, group in enumerate(groups)), reverse=True)
        for length, i in sized:  # the longest first, each into the fullest row that has room
            fitting = [row for row in rows if len(row.ids) + length <= ROW_TOKENS]
            row = max(fitting, key=lambda row: len(row.ids), default=None) or _Row(prompt_tokens)
            if not row.ids:
                rows.append(row)
            row.begin(groups[i].pictures)
            for question in groups[i].questions:
                row.add(*self._parts(question), len(questions))
                questions.append(question)
        return _stacked(rows, questions)

    def _parts(self, question: Question) -> tuple[list[int], list[int]]:
        asked = self.encode(f"{question.text}<|im_end|>\n<|im_start|>assistant\n")
        return asked, self.encode(f"{question.answer}<|im_end|>")

    def _length(self, group: Group) -> int:
        parts = [self._parts(question) for question in group.questions]
        return len(PICTURE) * len(group.pictures) + sum(len(asked) + len(answered) - 1 for asked, answered in parts)


class _Row:
    def __init__(self, prompt_tokens: int) -> None:
        self._first = prompt_tokens
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.targets: list[int] = []
        self.question: list[int] = []
        self.group: list[int] = []
        self.pictures: list[int] = []

    def begin(self, pictures: tuple[int, ...]) -> None:
        group = self.group[-1] + 1 if self.group else 0
        self._shared = len(PICTURE) * len(pictures)
        self._append(PICTURE * len(pictures), self._first, [-1] * self._shared, -1, group)
        self.pictures += pictures

    def add(self, asked: list[int], answered: list[int], question: int) -> None:
        targets = [-1] * (len(asked) - 1) + answered
        self._append(asked + answered[:-1], self._first + self._shared, targets, question, self.group[-1])

    def _append(self, ids: list[int], first: int, targets: list[int], question: int, group: int) -> None:
        self.ids += ids
        self.positions += range(first, first + len(ids))
        self.targets += targets
        self.question += [question] * len(ids)
        self.group += [group] * len(ids)


def _stacked(rows: list[_Row], questions: list[Question]) -> Rows:
    length = max(len(row.ids) for row in rows)
    length += -length % 16

    def padded(lists: list[list[int]], value: int) -> Tensor:
        return torch.tensor([items + [value] * (length - len(items)) for items in lists])

    question, group = padded([row.question for row in rows], -2), padded([row.group for row in rows], -2)
    shared = question == -1
    visible = (group[:, :, None] == group[:, None]) & ((question[:, :, None] == question[:, None]) | shared[:, None])
    visible &= torch.ones(length, length, dtype=torch.bool).tril()
    return Rows(
        ids=padded([row.ids for row in rows], 0),
        positions=padded([row.positions for row in rows], 0),
        targets=padded([row.targets for row in rows], -1),
        question=question,
        visible=visible,
        pictures=[picture for row in rows for picture in row.pictures],
        questions=questions,
    )
