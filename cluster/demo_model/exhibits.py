"""Pictures that the demo model has never seen, as files, each with a question and the right answer.

`python -m airside.cluster.demo_model.training.make_exhibits` drew them: the first three held-out questions of each
kind that the model is good at, whatever the model makes of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "assets" / "exhibits"
CATALOGUE = FOLDER / "exhibits.json"


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One question about one or two pictures, which are the bytes of PNG or JPEG files."""

    kind: str
    question: str
    answer: str
    names: tuple[str, ...]
    pictures: tuple[bytes, ...]

    @property
    def title(self) -> str:
        """For people: "digit-1", the name of its first file without the ending."""
        return self.names[0].rsplit(".", 1)[0]


def exhibits() -> list[Exhibit]:
    """All of them, three of each kind, the first of each kind before the second ones."""
    return [
        Exhibit(
            kind=entry["kind"],
            question=entry["question"],
            answer=entry["answer"],
            names=tuple(entry["pictures"]),
            pictures=tuple((FOLDER / name).read_bytes() for name in entry["pictures"]),
        )
        for entry in json.loads(CATALOGUE.read_text())
    ]


def digit_exhibits() -> list[Exhibit]:
    """Those that show one handwritten digit."""
    return [exhibit for exhibit in exhibits() if exhibit.kind == "digit"]
