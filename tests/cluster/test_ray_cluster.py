"""What is said about room in a Ray cluster; no Ray runs here."""

from __future__ import annotations

import pytest

from airside.cluster.supervisor.ray_cluster import lacking

WANTED = {"CPU": 1.0, "camera": 1.0}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([{"CPU": 1.0, "camera": 2.0}], ""),
        ([{"CPU": 0.5, "camera": 1.0}], "needs 1 CPU, 0.5 free"),
        ([{}], "needs 1 CPU, 0 free; needs 1 camera, 0 free"),
        ([{}, {"CPU": 4.0}], "needs 1 camera, 0 free"),
        ([{"CPU": 0.5, "camera": 1.0}, {"CPU": 0.5, "camera": 1.0}], "needs 1 CPU, 0.5 free"),  # no sum will do
        ([{"CPU": 0.5}, {"CPU": 8.0, "camera": 1.0}], ""),
        ([], "needs 1 CPU, 0 free; needs 1 camera, 0 free"),
    ],
)
def test_a_process_needs_its_room_on_one_node(nodes: list[dict[str, float]], said: str) -> None:
    assert lacking(WANTED, nodes) == said
