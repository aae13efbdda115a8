"""Which slabs the ranks of the current launch have got, of those that they cannot map. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from airside.controller.vision.pixel_cache import Slab


class Parcels:
    """Slabs whose bytes every rank of the launch has: each is sent once, before the first plan that reads it."""

    def __init__(self) -> None:
        self._sent: set[tuple[str, int]] = set()  # by segment and offset

    def take_missing(self, slabs: Iterable[Slab]) -> list[Slab]:
        """Those that the ranks must get before they read them, each once; they count as sent from now on."""
        missing = []
        for slab in slabs:
            place = slab.ref.segment, slab.ref.slab
            if slab.data is not None and place not in self._sent:
                self._sent.add(place)
                missing.append(slab)
        return missing

    def forget(self, segment: str, slab: int) -> bool:
        """Nobody reads this slab any more. Whether the ranks have it, and must be told."""
        if (segment, slab) not in self._sent:
            return False
        self._sent.remove((segment, slab))
        return True

    def clear(self) -> None:
        """The launch is no more: the ranks of the next one have nothing."""
        self._sent.clear()
