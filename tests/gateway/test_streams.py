"""The buffer between the controller's news and the call that reads them."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.streams import TOKENS_MAX, Lost, News, PromptRecords, Stream, Streams, Tokens
from airside.proto.messages import Accepted, ImageReady, Rejected
from tests.gateway.scripted_controller import batch, finish

ENDS: list[News] = [finish(1), Rejected(1, "queue_full", "why"), Lost("the controller was restarted")]


@pytest.mark.parametrize("end", ENDS)
def test_a_sequence_ends_once_and_nothing_follows(end: News) -> None:
    stream = Stream(asyncio.Event(), arrival=0.0)
    stream.put(end)
    for other in ENDS:
        stream.put(other)
    stream.put(ImageReady(1, 0, 4, 0.1))
    assert stream.put_tokens([5])
    stream.put_prompt_records(b"12345678")
    assert stream.take() == [end]


def test_a_controller_lost_after_the_end_is_no_second_end() -> None:
    streams = Streams(abort=lambda *_: None, metrics=RequestMetrics())
    inbox = streams.open([1, 2], arrival=0.0)
    streams.dispatch(batch((1, [7, 8]), (2, [9]), finished=[finish(1)]))
    streams.lose_all("gone")
    assert asyncio.run(inbox.take()) == [(0, Tokens([7, 8])), (0, finish(1)), (1, Tokens([9])), (1, Lost("gone"))]


def test_tokens_join_with_their_log_probabilities() -> None:
    streams = Streams(abort=lambda *_: None, metrics=RequestMetrics())
    inbox = streams.open([1, 2, 3], arrival=0.0)
    rows = [(1, [7, 8]), (2, [9]), (5, [1]), (3, [4])]
    records = {1: b"a" * 16, 2: b"b" * 8, 5: b"c" * 8}
    for step_tokens in (30, 31):
        streams.dispatch(dataclasses.replace(batch(*rows, records=records), step_tokens=step_tokens))
    assert asyncio.run(inbox.take()) == [
        (0, Tokens([7, 8] * 2, bytearray(b"a" * 32), 31)),
        (1, Tokens([9] * 2, bytearray(b"b" * 16), 31)),
        (2, Tokens([4] * 2, bytearray(), 31)),
    ]


def test_records_of_the_prompt_join_until_a_token_comes() -> None:
    streams = Streams(abort=lambda *_: None, metrics=RequestMetrics())
    inbox = streams.open([1], arrival=0.0)
    prompt = dataclasses.replace(
        batch(),
        prompt_seq_ids=np.array([5, 1], "<u8").tobytes(),
        prompt_sizes=np.array([8, 16], "<i4").tobytes(),
        prompt_logprobs=b"x" * 8 + b"y" * 16,
    )
    streams.dispatch(prompt)
    streams.dispatch(prompt)
    streams.dispatch(batch((1, [7])))
    assert asyncio.run(inbox.take()) == [(0, PromptRecords(bytearray(b"y" * 32))), (0, Tokens([7]))]


def test_answers_are_taken_first_and_together() -> None:
    async def scenario() -> None:
        streams = Streams(abort=lambda *_: None, metrics=RequestMetrics())
        inbox = streams.open([1, 2], arrival=0.0)
        streams.dispatch(Accepted(1, 0))
        streams.dispatch(batch((1, [7])))
        answers = asyncio.create_task(inbox.take_answers())
        await asyncio.sleep(0)
        assert not answers.done()
        streams.dispatch(Rejected(2, "queue_full", "why"))
        assert await answers == [Accepted(1, 0), Rejected(2, "queue_full", "why")]
        assert await inbox.take() == [(0, Tokens([7]))]

    asyncio.run(scenario())


def test_a_stream_that_overflows_aborts_its_sequence_once() -> None:
    aborted: list[int] = []
    streams = Streams(abort=lambda seq_id, _: aborted.append(seq_id), metrics=RequestMetrics())
    inbox = streams.open([1, 2], arrival=0.0)
    for _ in range(3):
        streams.dispatch(batch((1, [7] * TOKENS_MAX), (2, [8]), records={1: b"r" * 16}))
    assert aborted == [1]
    (_, kept), (_, other) = asyncio.run(inbox.take())
    assert kept == Tokens([7] * TOKENS_MAX, bytearray(b"r" * 16))
    assert other == Tokens([8] * 3)


def test_an_end_after_tokens_were_dropped_is_an_abort_whatever_the_engine_says() -> None:
    streams = Streams(abort=lambda *_: None, metrics=RequestMetrics())
    inbox = streams.open([1, 2], arrival=0.0)
    streams.dispatch(batch((1, [7] * TOKENS_MAX), (2, [7] * TOKENS_MAX)))
    streams.dispatch(batch((1, [7]), finished=[finish(1, "length"), finish(2, "length")]))
    (_, _), (_, cut_off), (_, _), (_, whole) = asyncio.run(inbox.take())
    assert cut_off == dataclasses.replace(
        finish(1), reason="abort", detail=f"the client stopped reading: {TOKENS_MAX} tokens wait for it"
    )
    assert whole == finish(2, "length")


def test_columns_that_do_not_fit_are_an_error() -> None:
    streams = Streams(abort=lambda *_: None, metrics=RequestMetrics())
    whole = batch((1, [7, 8]))
    with pytest.raises(ValueError, match="zip"):
        streams.dispatch(type(whole)(whole.seq_ids, whole.num_tokens * 2, whole.token_ids))
