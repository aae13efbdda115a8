"""What rank 0 says of images' embeddings, on its way to the gateways."""

from __future__ import annotations

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import Gateway


def test_each_gateway_hears_of_its_own_images(bus: Bus) -> None:
    bus.start()
    first, second, rank = bus.gateway("gateway-0"), bus.gateway("gateway-1"), bus.rank()
    for number, gateway in enumerate((first, second), start=1):
        gateway.wait_ready()
        gateway.add(number, max_tokens=2)
        gateway.accepted(number)
    rank.answer(rank.plan(), encoded=[msg.EncodedRow(1, 0, 0.5), msg.EncodedRow(1, 2, 0.0), msg.EncodedRow(2, 1, 0.25)])
    assert first.expect(msg.ImageEncoded) == msg.ImageEncoded(1, 0, 0.5)
    assert first.expect(msg.ImageEncoded) == msg.ImageEncoded(1, 2, 0.0)
    assert second.expect(msg.ImageEncoded) == msg.ImageEncoded(2, 1, 0.25)
    assert not first.heard(msg.ImageEncoded)
    assert not second.heard(msg.ImageEncoded)


def test_embeddings_come_before_the_end_that_their_step_brings(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=1)
    rank.answer(rank.plan(), encoded=[msg.EncodedRow(1, 0, 0.5)])
    came = [type(gateway.expect_envelope(msg.Message).message) for _ in range(3)]
    assert came == [msg.Accepted, msg.ImageEncoded, msg.OutputBatch]


def test_what_images_had_left_is_counted_beyond_the_ranks_that_had_it(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=2)
    rows = [msg.EncodedRow(1, 0, 0.5, 64), msg.EncodedRow(1, 1, 0.0, 64), msg.EncodedRow(99, 0, 0.5, 96)]
    rank.answer(rank.plan(), encoded=rows)
    gateway.expect(msg.ImageEncoded)
    assert tally(gateway) == (1, 2, 96)
    second = bus.rank("worker-1", group=1)
    assert tally(gateway) == (1, 2, 0)
    second.answer(second.plan(), encoded=[msg.EncodedRow(1, 0, 0.25, 32)])
    gateway.finish(1)
    assert tally(gateway) == (1, 3, 32)


def tally(gateway: Gateway) -> tuple[float, ...]:
    gauges = gateway.gauges().gauges
    return tuple(gauges[f"embedding_cache_{what}"] for what in ("hits", "misses", "bytes"))


def test_embeddings_of_a_sequence_that_is_over_are_nobodys(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=1)
    rank.answer(rank.plan(), encoded=[msg.EncodedRow(99, 0, 0.5)])
    gateway.finish(1)
    assert not gateway.heard(msg.ImageEncoded)
