"""The ranks of one launch of the model's worker group."""

from __future__ import annotations

from airside.proto.messages import WorkerHello


class WorkerGroup:
    """Collects the hellos of one launch's ranks.

    Args:
        number: which launch.
        world_size: how many ranks make the group whole.
    """

    def __init__(self, number: int, world_size: int) -> None:
        self.number = number
        self._world_size = world_size
        self._ranks: dict[int, tuple[str, WorkerHello]] = {}

    def add(self, name: str, hello: WorkerHello) -> None:
        """A rank has loaded its weights."""
        assert hello.group == self.number
        self._ranks[hello.rank] = name, hello

    @property
    def is_whole(self) -> bool:
        """Whether every rank has said hello."""
        return len(self._ranks) == self._world_size

    @property
    def names(self) -> list[str]:
        """Bus names of the ranks so far."""
        return [name for name, _ in self._ranks.values()]

    @property
    def speaker(self) -> str | None:
        """Bus name of rank 0, the one that sends results."""
        return self._ranks[0][0] if 0 in self._ranks else None

    @property
    def num_blocks(self) -> int:
        """KV blocks that every rank can hold."""
        return min(hello.num_blocks for _, hello in self._ranks.values())

    @property
    def num_state_slots(self) -> int:
        """Sequences whose fixed-size state every rank can hold."""
        return min(hello.num_state_slots for _, hello in self._ranks.values())
