"""Twenty handwritten digits that the demo model has never seen, as picture files with their labels.

They are real scans (UCI's optical recognition of handwritten digits, through scikit-learn) from the fifth that was
held out of the training: the first two of each digit, whatever the model makes of them. `make_digits.py` drew them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "assets" / "digits"
QUESTION = "What digit is this?"


@dataclass(frozen=True, slots=True)
class DigitPicture:
    """One picture: `data` is the PNG or JPEG file, `name` its file name."""

    name: str
    label: int
    data: bytes

    @property
    def title(self) -> str:
        """For people: "digit 7 PNG"."""
        return f"digit {self.label} {'PNG' if self.name.endswith('.png') else 'JPEG'}"

    @property
    def answer(self) -> str:
        """The sentence that the demo model was trained to answer `QUESTION` with."""
        return f"The digit is {self.label}."


def digit_pictures() -> list[DigitPicture]:
    """All of them: 0 to 9 as PNG, then 0 to 9 as JPEG."""
    paths = sorted(FOLDER.iterdir(), key=lambda path: (path.suffix != ".png", path.name))
    return [DigitPicture(path.name, int(path.name[0]), path.read_bytes()) for path in paths]
