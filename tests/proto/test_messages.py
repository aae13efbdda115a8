"""The bus's frames: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airside.proto import codec, messages
from airside.proto.messages import MessageRefused, decode, encode

PIXELS = messages.PixelsRef("seg", 64, 12, [messages.TensorRef("pixel_values", "float32", [1, 3], 0)])
EXAMPLES = [
    messages.Heartbeat(5),
    messages.AddRequest(1 << 62, "é", b"\1\0\0\0", [0], 1.5, -1, None, None, 0, [2], 0.0, 0, 1.0, 0.0, (1 << 64) - 1),
    messages.OutputBatch(b"", b"", b"", [messages.FinishedRow(1, "stop", "", 1, 0, 2, 0, 0.1, 0.2, 0.3)]),
    messages.Peers(1, [messages.PeerRow("worker", "w", 0, "n", 2, "ready", 0.5, 3, 4)], 1, ""),
    messages.StepPlan(1, *[b""] * 13, {0: [2, 3]}, [messages.ImageRow(1, 0, 0, 4, PIXELS)]),
    messages.StepPlan(
        *(2, *[b""] * 13),
        forced=b"\1\0\0\0",
        prompt_logprobs=[messages.PromptLogprobRow(0, 1, 2, b"\3\0\0\0")],
        opened=[messages.OpenedRow(1, 3, b"", 1.5, 0.0, -0.5, {7: -2.0}, [1, 2])],
    ),
    messages.OpenGrammar(1, "grammar", b"\1\0\0\0"),
    messages.StopSequence(1, 2, "stop string"),
    messages.Gauges(1, {"steps": 2.0}, {"stop": 1}, {}, {"apply": 0.5}),
    messages.Pixels(1, 0, 1, PIXELS, 0.5),
    messages.Drain(),
    messages.VisionHello("there", 7, "airside-run-v1", 4096, shares_memory=False),
    messages.PixelsParcel("airside-run-v1", 0, 4096),
    messages.DropPixels("airside-run-v1", 0),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)
def test_what_goes_in_comes_out(example: messages.Message) -> None:
    assert decode(encode(example)) == example


def test_a_float_field_takes_an_int_from_another_language() -> None:
    frame = bytes((codec.VERSION,)) + msgpack.packb([messages.StepResult.kind, 7, b"", 3])
    assert decode(frame) == messages.StepResult(7, b"", 3.0)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "malformed"),
        (b"\x01", "malformed"),
        (b"\x09" + msgpack.packb([1, 2]), "version"),
        (b"\x01" + msgpack.packb([9999, 2]), "unknown_kind"),
        (b"\x01" + msgpack.packb(["x"]), "unknown_kind"),
        (b"\x01" + msgpack.packb(5), "malformed"),
        (b"\x01" + msgpack.packb([]), "malformed"),
        (b"\x01" + msgpack.packb([1]), "malformed"),
        (b"\x01" + msgpack.packb([1, 2, 3]), "malformed"),
        (b"\x01" + msgpack.packb([1, "five"]), "malformed"),
        (b"\x01" + msgpack.packb([1, True]), "malformed"),
        (b"\x01" + msgpack.packb([1, 2])[:-1], "malformed"),
    ],
)
def test_a_frame_that_is_not_ours_is_refused_by_name(frame: bytes, why: str) -> None:
    with pytest.raises(MessageRefused) as caught:
        decode(frame)
    assert caught.value.why == why


def test_threads_encode_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = messages.OutputBatch(b"", b"", b"", [messages.FinishedRow(1, "stop", "", 1, 0, 2, 0, 0.1, 0.2, 0.3)])
    assert decode(encode(batch)) == batch
    read, others = codec._readers[messages.FinishedRow], []

    def read_slowly(row: object) -> Iterable[object]:
        with ThreadPoolExecutor(1) as thread:
            others.append(thread.submit(encode, messages.Heartbeat(5)).result())
        return read(row)

    monkeypatch.setitem(codec._readers, messages.FinishedRow, read_slowly)
    assert decode(encode(batch)) == batch
    assert [decode(frame) for frame in others] == [messages.Heartbeat(5)]


def test_a_batch_of_outputs_is_read_row_by_row() -> None:
    batch = messages.OutputBatch(
        *(struct.pack("<3Q", 5, 6, 7), struct.pack("<3i", 2, 0, 1), struct.pack("<3i", 10, 11, 12)),
        logprob_sizes=struct.pack("<3i", 2, 0, 3),
        logprobs=b"aaccc",
        prompt_seq_ids=struct.pack("<2Q", 7, 5),
        prompt_sizes=struct.pack("<2i", 1, 2),
        prompt_logprobs=b"xyy",
    )
    assert list(batch.rows()) == [(5, [10, 11]), (6, []), (7, [12])]
    assert list(batch.records()) == [b"aa", b"", b"ccc"]
    assert list(batch.prompt_rows()) == [(7, b"x"), (5, b"yy")]


def test_a_batch_that_nobody_wants_records_of_has_an_empty_one_for_each_row() -> None:
    batch = messages.OutputBatch(struct.pack("<2Q", 5, 6), struct.pack("<2i", 1, 1), struct.pack("<2i", 10, 11))
    assert list(batch.records()) == [b"", b""]
    assert list(batch.prompt_rows()) == []


@given(st.binary(max_size=60))
def test_noise_is_refused_and_never_raises_anything_else(noise: bytes) -> None:
    try:
        message = decode(b"\x01" + noise)
    except MessageRefused:
        return
    assert isinstance(message, messages.Message)


def test_kinds_are_unique_and_fields_with_defaults_come_last() -> None:
    kinds = [cls.kind for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, messages.Message)]
    kinds.remove(-1)  # the base class
    assert len(kinds) == len(set(kinds))
    for cls in vars(messages).values():
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            has_default = [
                f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
                for f in dataclasses.fields(cls)
            ]
            assert has_default == sorted(has_default)
