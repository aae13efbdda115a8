"""How many vision workers a command line asks for: "3", or "1-4"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class VisionSize:
    """The fewest and the most; `most` is None when it is exactly `fewest`, whatever the load."""

    fewest: int
    most: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, which says what would be right."""
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is neither a number, such as 3, nor a range, such as 1-4")
        fewest, most = int(match[1]), None if match[2] is None else int(match[2])
        if most is not None and most < fewest:
            raise ValueError(f"{text!r} is no range: {most} is less than {fewest}")
        return cls(fewest, most)

    def __str__(self) -> str:
        return str(self.fewest) if self.most is None else f"{self.fewest} to {self.most}"

    def holds(self, replicas: int) -> bool:
        """Whether so many are what was asked for."""
        return self.fewest <= replicas <= (self.fewest if self.most is None else self.most)
