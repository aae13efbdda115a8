"""The demo model answers held-out questions of the shown kinds, through `Generate`, from files of many sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from airside.cluster.demo_model.training.evaluate import examine, of_server, table
from airside.cluster.demo_model.training.questions import SHOWN
from tests.system.local_server import LocalServer

pytestmark = pytest.mark.slow

PER_KIND = 40
RIGHT_MIN = 0.9


@pytest.mark.timeout(900)
def test_nine_of_ten_are_right_of_every_kind_shown(built_demo: Path) -> None:
    with LocalServer(built_demo, model={"dtype": "bfloat16"}) as server:
        results = examine(of_server(server.address), list(SHOWN), PER_KIND)
    print(table(results))
    low = {str(result.kind): result.right for result in results if result.right < RIGHT_MIN * result.asked}
    assert not low
