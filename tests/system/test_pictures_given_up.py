"""Thousands of requests with pictures, a fifth of them given up at random moments: all is as it was before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.given_up import assert_nothing_grows
from tests.system.local_server import LocalServer

pytestmark = pytest.mark.slow

ROUND = 1000
GROWTH_MAX = {"controller": 3, "gateway-0": 5, "vision-0": 3, "vision-1": 3, "worker-0": 10}  # MiB
SLAB_ENDS_MAX = 256 * 1024  # bytes of pages that a slab fills in part


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Its caches are full after a few pictures."""
    vision = {
        "autoscaling_config": {"min_replicas": 2},
        "arena": "16MiB",
        "cache": {"pixels": "2MiB", "embeddings": "256KiB"},
    }
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, kv_blocks=400, vision=vision, engine={"num_threads": 1, "max_num_seqs": 8}) as running:
        yield running


def test_everything_is_as_it_was_before(server: LocalServer) -> None:
    def check_at_rest() -> None:
        wait_until(
            lambda: server.shared_memory() <= server.gauges().image_cache_bytes + SLAB_ENDS_MAX, 2.0, "memory is back"
        )

    assert_nothing_grows(server, ROUND, GROWTH_MAX, check_at_rest)
    assert server.gauges().image_cache_hits == 0
