"""Gateways by bus name and by the small number that the engine groups outputs by."""

from __future__ import annotations


class FrontEnds:
    """Numbers are given once and never again, so outputs of a gateway that is gone reach nobody else."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._next = 0

    def join(self, name: str) -> int:
        """A number for a gateway that is not here yet."""
        assert name not in self._number_of, name
        number, self._next = self._next, self._next + 1
        self._number_of[name], self._name_of[number] = number, name
        return number

    def leave(self, name: str) -> int | None:
        """Forgets a gateway; returns the number that it had."""
        number = self._number_of.pop(name, None)
        if number is not None:
            del self._name_of[number]
        return number

    def number(self, name: str) -> int | None:
        """The number of a gateway that is here."""
        return self._number_of.get(name)

    def name(self, number: int) -> str | None:
        """The gateway of this number, if it is still here."""
        return self._name_of.get(number)

    @property
    def names(self) -> list[str]:
        """All that are here."""
        return list(self._number_of)
