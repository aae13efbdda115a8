"""What a client is told of its images: as each is ready, and at the end of all of them together."""

from __future__ import annotations

from typing import Any

from airside.proto.messages import ImageEncoded, ImageReady, ImageStages
from tests.gateway.client import Client
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.gateway.test_generate import image
from tests.gateway.tiny_checkpoint import byte_level_tokenizer

TOKEN = byte_level_tokenizer().token_to_id("a")
STAGES = ("fetch_s", "queue_s", "decode_s", "process_s", "transport_s")


def stages_of(message: Any) -> tuple[float, ...]:
    return tuple(getattr(message, name) for name in STAGES)


def run(client: Client, controller: ScriptedController, *news: ImageReady | ImageEncoded) -> list[Any]:
    """All events of a request with three images, of which the controller says this. Sequence ids are filled in."""
    call = client.generate(prompt="<image>" * 3, images=[image(b"one"), image(b"two"), image(b"one")])
    request = controller.accept()
    for message in news:
        controller.send(type(message)(request.seq_id, *[getattr(message, name) for name in message.__slots__[1:]]))
    controller.send(batch((request.seq_id, [TOKEN]), finished=[finish(request.seq_id)]))
    return list(call)


def test_stages_are_told_per_image_and_added_up(client: Client, controller: ScriptedController) -> None:
    first, second = ImageStages(1.0, 0.5, 0.25, 0.125, 0.0625), ImageStages(0.0, 2.0, 4.0, 8.0, 16.0)
    events = run(
        client,
        controller,
        ImageReady(0, 0, 4, 0.375, cached=False, stages=first),
        ImageReady(0, 1, 5, 12.0, cached=False, stages=second),
        ImageReady(0, 2, 4, 0.0, cached=True, stages=ImageStages()),
        ImageEncoded(0, 0, 0.5),
        ImageEncoded(0, 1, 0.25),
        ImageEncoded(0, 2, 0.0),
    )
    ready = [event.image_ready for event in events if event.WhichOneof("event") == "image_ready"]
    assert [(row.index, row.tokens, row.process_s, row.cached) for row in ready] == [
        (0, 4, 0.375, False),
        (1, 5, 12.0, False),
        (2, 4, 0.0, True),
    ]
    assert [stages_of(row.stages) for row in ready] == [
        (1.0, 0.5, 0.25, 0.125, 0.0625),
        (0.0, 2.0, 4.0, 8.0, 16.0),
        (0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    end = events[-1].finished
    assert stages_of(end.timings.images) == (1.0, 2.5, 4.25, 8.125, 16.0625)
    assert end.timings.image_encode_s == 0.75
    assert end.usage.cached_images == 1
    assert (end.timings.queued_s, end.usage.image_tokens) == (0.25, 7), "the engine's own numbers are gone"


def test_stages_that_nobody_measured_are_left_out(client: Client, controller: ScriptedController) -> None:
    events = run(client, controller, ImageReady(0, 1, 4, 0.5))
    [ready] = [event.image_ready for event in events if event.WhichOneof("event") == "image_ready"]
    assert (ready.index, ready.process_s, ready.cached, ready.HasField("stages")) == (1, 0.5, False, False)
    assert not events[-1].finished.timings.HasField("images")


def test_each_continuation_has_images_of_its_own(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="<image>", n=2, images=[image(b"one")])
    first, second = controller.accept(), controller.accept()
    stages = ImageStages(decode_s=0.5)
    controller.send(ImageReady(first.seq_id, 0, 4, 0.5, cached=False, stages=stages))
    controller.send(ImageReady(second.seq_id, 0, 4, 0.0, cached=True, stages=ImageStages()))
    controller.send(ImageEncoded(first.seq_id, 0, 0.25))
    controller.send(ImageEncoded(second.seq_id, 0, 0.0))
    controller.send(batch(finished=[finish(first.seq_id), finish(second.seq_id)]))
    events = list(call)
    assert [event.WhichOneof("event") for event in events].count("image_ready") == 1
    ends = {event.finished.index: event.finished for event in events if event.WhichOneof("event") == "finished"}
    seen = {i: (e.usage.cached_images, e.timings.images.decode_s, e.timings.image_encode_s) for i, e in ends.items()}
    assert seen == {0: (0, 0.5, 0.25), 1: (1, 0.0, 0.0)}
