"""What is said about room in a Ray cluster; no Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from airside.cluster.supervisor import ray_cluster
from airside.cluster.supervisor.ray_cluster import RayCluster, lacking

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


def test_what_other_nodes_have_is_no_room_for_what_has_to_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": "a", "Resources": {"CPU": 2.0}}, {"NodeID": "b", "Resources": {"CPU": 64.0}}]
    monkeypatch.setattr(ray_cluster, "_ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(ray_cluster, "available_resources_per_node", lambda: {"a": {"CPU": 1.0}, "b": {"CPU": 64.0}})
    cluster = cast(RayCluster, SimpleNamespace(_node_id="a", node="here"))
    assert RayCluster._shortage(cluster, [{}, {"CPU": 1.0}, {"CPU": 1.0}], "some.key") == (
        "2 CPU: 1 of 2 free on node here (some.key)"
    )
