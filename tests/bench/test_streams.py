"""Streams against a scripted OpenAI-style server: what is counted, what is timed, what is said about errors."""

from __future__ import annotations

import asyncio

import pytest

from airside.cluster.bench.http_target import HttpTarget
from airside.cluster.bench.serve import ServeLoad, bench_serve, summary
from airside.cluster.bench.streams import Round, StreamTimes, TargetError, run_round
from tests.bench.scripted_openai import Script, scripted_openai
from tests.real_processes import free_port

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
    script = Script(pause_s=0.02)
    one_round(script, num_requests=8, num_streams=4)
    assert script.most_at_once == 4


def test_what_a_server_refuses_is_told() -> None:
    with pytest.raises(TargetError, match=r"400.*token ids are not taken"):
        one_round(Script(error="token ids are not taken"), 1, 1)


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(TargetError, match=r"no server answers at 127\.0\.0\.1"):
        asyncio.run(HttpTarget(f"http://127.0.0.1:{free_port()}/v1").open())
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
