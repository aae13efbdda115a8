"""The buffer between the controller's news and the call that reads them."""

from __future__ import annotations

import asyncio

import pytest

from airside.controller.gateway.streams import Lost, News, Stream, Streams, Tokens
from airside.proto.messages import ImageReady, Rejected
from tests.gateway.scripted_controller import batch, finish

ENDS: list[News] = [finish(1), Rejected(1, "queue_full", "why"), Lost("the controller was restarted")]


def taken(stream: Stream) -> list[News]:
    return asyncio.run(stream.take())


@pytest.mark.parametrize("end", ENDS)
def test_a_sequence_ends_once_and_nothing_follows(end: News) -> None:
    stream = Stream(1)
    stream.put(end)
    for other in ENDS:
        stream.put(other)
    stream.put(ImageReady(1, 0, 4, 0.1))
    assert stream.put_tokens([5])
    assert taken(stream) == [end]


def test_a_controller_lost_after_the_end_is_no_second_end() -> None:
    streams = Streams(abort=lambda *_: None)
    ended, open_ = streams.open(1), streams.open(2)
    streams.dispatch(batch((1, [7, 8]), (2, [9]), finished=[finish(1)]))
    streams.lose_all("gone")
    assert taken(ended) == [Tokens([7, 8]), finish(1)]
    assert taken(open_) == [Tokens([9]), Lost("gone")]


def test_columns_that_do_not_fit_are_an_error() -> None:
    streams = Streams(abort=lambda *_: None)
    whole = batch((1, [7, 8]))
    with pytest.raises(ValueError, match="zip"):
        streams.dispatch(type(whole)(whole.seq_ids, whole.num_tokens * 2, whole.token_ids))
