"""Streams against a scripted OpenAI-style server: what is counted, what is timed, what is said about errors."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct

import pytest

from airside.cluster.bench.http_target import HttpTarget
from airside.cluster.bench.serve import ServeLoad, bench_serve, summary
from airside.cluster.bench.streams import Round, StreamTimes, TargetError, run_round
from tests.bench.scripted_openai import Script, scripted_openai

LOAD = ServeLoad(streams=3, requests=7, prompt_tokens=5, output_tokens=4, rounds=2, vocab_size=512)


def one_round(script: Script, num_requests: int, num_streams: int) -> Round:
    async def run(url: str) -> Round:
        target = HttpTarget(url)
        await target.open()
        return await run_round(target, [[n, n + 1] for n in range(num_requests)], 4, num_streams)

    with scripted_openai(script) as url:
        return asyncio.run(run(url))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("usage", [True, False])
def test_every_token_is_counted_and_timed(chunked: bool, split: bool, usage: bool) -> None:
    script = Script(chunked=chunked, split=split, usage=usage)
    done = one_round(script, num_requests=5, num_streams=2)
    assert [stream.num_tokens for stream in done.streams] == [4] * 5
    assert [len(stream.came) for stream in done.streams] == [4] * 5
    assert [stream.prompt_tokens for stream in done.streams] == [2 if usage else None] * 5
    for stream in done.streams:
        assert stream.sent + script.pause_s <= stream.came[0] <= stream.came[-1] <= stream.ended
        assert stream.came == sorted(stream.came)
    assert sorted(asked["prompt"] for asked in script.asked) == [[n, n + 1] for n in range(5)]
    assert script.asked[0].items() >= {"model": "scripted", "max_tokens": 4, "stream": True, "ignore_eos": True}.items()


def test_so_many_streams_are_open_at_any_time() -> None:
    script = Script(waits_for=4)
    one_round(script, num_requests=8, num_streams=4)
    assert script.most_at_once == 4


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("closes_after", [0, 70, 130])  # within the first event, and within the second
def test_an_answer_that_breaks_off_is_an_error(chunked: bool, closes_after: int) -> None:
    with pytest.raises(TargetError, match=r"closed the connection within an answer|or broke off"):
        one_round(Script(chunked=chunked, closes_after=closes_after), 1, 1)


def answered(answer: bytes, resets: bool = False) -> StreamTimes:
    """By a server that sends so much, and closes or resets the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if resets:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def run() -> StreamTimes:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await HttpTarget(f"http://127.0.0.1:{port}/v1", "any").stream([1], 1)

    return asyncio.run(run())


HEAD = b"HTTP/1.1 200 OK\r\n"
EVENT = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", HEAD, HEAD + b"Content-Length: 200\r\n\r\n" + EVENT])
@pytest.mark.parametrize("resets", [True, False])
def test_so_is_one_that_breaks_off_anywhere_else(answer: bytes, resets: bool) -> None:
    with pytest.raises(TargetError, match="closed the connection within an answer"):
        answered(answer, resets)


def test_what_is_no_answer_is_an_error() -> None:
    with pytest.raises(TargetError, match="in place of a chunk's size"):
        answered(HEAD + b"Transfer-Encoding: chunked\r\n\r\nnone\r\n")
    with pytest.raises(TargetError, match="an event that is not JSON, or broke off"):
        answered(HEAD + b"\r\ndata: {\n\n")
    assert answered(HEAD + b"\r\n" + EVENT).num_tokens == 1  # without [DONE]; it has an end


def test_garbage_is_collected_again_after_a_round() -> None:
    one_round(Script(), 1, 1)
    assert gc.get_freeze_count() == 0


def test_what_a_server_refuses_is_told() -> None:
    with pytest.raises(TargetError, match=r"400.*token ids are not taken"):
        one_round(Script(error="token ids are not taken"), 1, 1)


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # taken, and nobody listens
        target = HttpTarget(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")
        with pytest.raises(TargetError, match=r"no server answers at 127\.0\.0\.1"):
            asyncio.run(target.open())
    with pytest.raises(TargetError, match="must be like"):
        HttpTarget("127.0.0.1:8000")


def test_the_report_has_every_figure_and_sample() -> None:
    with scripted_openai(Script()) as url:
        report = bench_serve(HttpTarget(url), url, LOAD)
    values = [row["value"] for table in report.tables for row in table.rows]
    assert [len(table.rows) for table in report.tables] == [2, 4]
    assert all(isinstance(value, float) and value > 0 for value in values)
    assert len(report.samples["output_per_s"]) == LOAD.rounds
    assert len(report.samples["first_s"]) == LOAD.rounds * LOAD.requests
    assert len(report.samples["gaps_s"]) == LOAD.rounds * LOAD.requests * (LOAD.output_tokens - 1)


def test_a_round_is_summed_up() -> None:
    streams = [
        StreamTimes(sent=10.0, came=[10.1, 10.2, 10.4], ended=10.4, num_tokens=3),
        StreamTimes(sent=10.0, came=[10.3, 10.4], ended=10.5, num_tokens=5),
    ]
    assert summary(Round(2.0, streams)) == pytest.approx(
        {
            "output_per_s": 4.0,
            "requests_per_s": 1.0,
            "first_p50_ms": 200.0,
            "first_p99_ms": 298.0,
            "gap_p50_ms": 100.0,
            "gap_p99_ms": 198.0,
        }
    )
