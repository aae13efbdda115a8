"""Images that are only counted: who is asked, and what becomes of it when workers and gateways go."""

from __future__ import annotations

from airside.controller.vision.effects import Send
from airside.controller.vision.header_counts import FIRST_ID, IMAGES_MAX, HeaderCounts
from airside.proto import messages as msg
from airside.proto.channel import OUTBOX_MESSAGES_MAX
from tests.controller.conftest import Bus
from tests.controller.scripted import IMAGE_TOKEN, i32

FILES = [memoryview(b"one"), memoryview(b"other")]


def counts() -> HeaderCounts:
    return HeaderCounts(bytes_max=20)


def shape(index: int, num_tokens: int, epoch: int = 1, count: int = 0) -> msg.Shape:
    return msg.Shape(FIRST_ID + count, index, epoch, i32(*[IMAGE_TOKEN] * num_tokens), 8, 8)


def test_each_image_is_asked_for_and_the_last_answer_answers() -> None:
    made = counts()
    assert made.open("gateway-0", msg.CountImages(7), FILES, ["v0"]) == [
        Send("v0", msg.Probe(FIRST_ID, 0, 1), (FILES[0],)),
        Send("v0", msg.Probe(FIRST_ID, 1, 1), (FILES[1],)),
    ]
    assert made.is_ours(shape(1, 5))
    assert not made.is_ours(msg.Shape(1, 0, 1, b""))
    assert made.hear("v0", shape(1, 5)) == []
    assert made.hear("v1", shape(0, 9)) == [] == made.hear("v0", shape(0, 9, epoch=2)) == made.hear("v0", shape(2, 9))
    assert made.hear("v0", shape(0, 3)) == [Send("gateway-0", msg.ImagesCounted(7, [3, 5]))]
    assert made.hear("v0", shape(0, 3)) == []


def test_each_image_has_its_own_range_and_columns_must_fit() -> None:
    made = counts()
    sends = made.open("gateway-0", msg.CountImages(7, [0, 4], [0, 9]), FILES, ["v0"])
    assert [send.message for send in sends] == [
        msg.Probe(FIRST_ID, 0, 1),
        msg.Probe(FIRST_ID, 1, 1, "", 4, 9),
    ]
    for query, files in (
        (msg.CountImages(8, [1], [1]), FILES),
        (msg.CountImages(8, [0, -1], []), FILES),
        (msg.CountImages(8, [1], [1]), []),
    ):
        (send,) = made.open("gateway-0", query, files, ["v0"])
        assert isinstance(send.message, msg.ImagesCounted)
        assert send.message.refused == "invalid"
    assert made.open("gateway-0", msg.CountImages(9), [], ["v0"]) == [Send("gateway-0", msg.ImagesCounted(9, []))]


def test_an_image_that_has_no_header_is_told_with_its_cause() -> None:
    made = counts()
    made.open("gateway-0", msg.CountImages(7), FILES, ["v0"])
    failed = msg.ImageFailed(FIRST_ID, 1, 1, "truncated", "it ends early")
    answer = msg.ImagesCounted(7, [], "image", "image 1: truncated: it ends early", "truncated")
    assert made.hear("v0", failed) == [Send("gateway-0", answer)]
    assert made.hear("v0", shape(0, 3)) == []


def test_another_is_asked_when_a_worker_is_lost_but_not_for_ever() -> None:
    made = counts()
    made.open("gateway-0", msg.CountImages(7), FILES, ["v0", "v1"])
    made.hear("v0", shape(0, 3))
    assert (made.has_asked("v0"), made.has_asked("v1")) == (True, False)
    sends = made.lose("v0", ["v1"])
    assert [(send.peer, send.message) for send in sends] == [("v1", msg.Probe(FIRST_ID, i, 2)) for i in range(2)]
    assert made.lose("v0", ["v1"]) == []
    made.lose("v1", ["v2"])
    (send,) = made.lose("v2", ["v3"])
    assert isinstance(send.message, msg.ImagesCounted)
    assert (send.peer, send.message.refused, send.message.image_cause) == ("gateway-0", "image", "worker_lost")


def test_nobody_to_ask() -> None:
    made = counts()
    for sends in (
        made.open("gateway-0", msg.CountImages(7), FILES, []),
        made.open("gateway-0", msg.CountImages(8), FILES, ["v0"]) and made.lose("v0", []),
    ):
        (send,) = sends
        assert isinstance(send.message, msg.ImagesCounted)
        assert send.message.refused == "unavailable"


def test_the_next_goes_to_whom_has_the_fewest_and_files_are_bounded() -> None:
    made = counts()
    assert {send.peer for send in made.open("gateway-0", msg.CountImages(1), FILES, ["v0", "v1"])} == {"v0"}
    assert {send.peer for send in made.open("gateway-1", msg.CountImages(2), FILES, ["v0", "v1"])} == {"v1"}
    (send,) = made.open("gateway-0", msg.CountImages(3), FILES, ["v0", "v1"])
    assert isinstance(send.message, msg.ImagesCounted)
    assert send.message.refused == "queue_full"
    made.forget("gateway-0")  # it is gone, and its files with it
    assert len(made.open("gateway-1", msg.CountImages(4), FILES, ["v0", "v1"])) == 2
    assert made.hear("v0", shape(0, 3)) == []


def test_what_can_never_be_counted_is_not_advised_to_try_again() -> None:
    made = counts()
    (send,) = made.open("gateway-0", msg.CountImages(1), [memoryview(bytes(21))], ["v0"])
    assert isinstance(send.message, msg.ImagesCounted)
    assert send.message.refused == "invalid"
    assert "have 21 bytes together, at most 20" in send.message.detail
    assert len(made.open("gateway-0", msg.CountImages(2), [memoryview(bytes(20))], ["v0"])) == 1


def test_no_worker_gets_more_questions_than_its_outbox_has_room_for() -> None:
    made = counts()
    files = [memoryview(b"")] * (IMAGES_MAX // 2)
    takers = ["v0"]
    assert len(made.open("gateway-0", msg.CountImages(1), files, takers)) == len(files)
    assert len(made.open("gateway-0", msg.CountImages(2), files, takers)) == len(files)
    (send,) = made.open("gateway-0", msg.CountImages(3), files[:1], takers)
    assert isinstance(send.message, msg.ImagesCounted)
    assert send.message.refused == "queue_full"
    made.hear("v0", msg.ImageFailed(FIRST_ID, 0, 1, "empty", "it has no bytes"))
    assert len(made.open("gateway-0", msg.CountImages(4), files, takers)) == len(files)
    assert IMAGES_MAX <= OUTBOX_MESSAGES_MAX // 4


def test_a_count_passes_through_the_controller_beside_a_sequence_with_the_same_picture(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    vision = bus.vision_worker("vision-0")
    gateway.wait_ready(vision=True)
    gateway.send(msg.CountImages(5), b"picture", b"other")
    first, second = vision.probe(), vision.probe()
    assert (first.image_index, second.image_index) == (0, 1)
    gateway.add(1, (11, IMAGE_TOKEN, 12), b"picture", max_tokens=1)
    job = vision.job()
    assert job == msg.Job(1, 0, 1), "nothing else is to be made"
    vision.shape(second)
    vision.shape(first)
    assert gateway.expect(msg.ImagesCounted) == msg.ImagesCounted(5, [3, 3])
    vision.pixels(job)
    rank.step_until_end(gateway, 1)


def test_a_count_outlives_its_vision_worker(bus: Bus) -> None:
    bus.start()
    gateway, _ = bus.gateway(), bus.rank()
    gateway.wait_ready()
    first = bus.vision_worker("vision-0")
    gateway.await_peer("vision-0", "ready")  # the first to join is the first to be asked
    second = bus.vision_worker("vision-1")
    gateway.await_peer("vision-1", "ready")
    gateway.send(msg.CountImages(5), b"picture")
    first.probe()
    bus.supervisor().send(msg.PeerLost("vision-0", "exit code -11"))
    second.shape(second.probe())
    assert gateway.expect(msg.ImagesCounted) == msg.ImagesCounted(5, [3])
