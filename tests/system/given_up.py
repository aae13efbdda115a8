"""Requests with pictures, a fifth of them given up at random moments, and what a server takes of the machine then."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from airside.proto import airside_pb2 as pb
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer, read_failing
from tests.system.picture_requests import PATIENCE_S, in_new_file, picture, request

CLIENTS = 12
GIVEN_UP_OF = 5
MOMENT_MAX_S = 0.25  # after which one is given up, at the latest
LONG_TOKENS = 800  # of one that is given up: it would take much longer
SIZES = [(96, 64), (48, 80), (700, 500), (1600, 1200)]
THREADS_MORE_MAX = 4  # gateways have pools of threads that fill only now and then

Call = Any  # a call of grpc's: to be read, and to be cancelled


class Clients:
    """Ask about one of a few pictures at a time, in files that nobody has seen."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._files = [picture(*size, turn=turn) for size in SIZES for turn in (0, 40, 80)]
        self._expected = [self._ask(which, -1 - which) for which in range(len(self._files))]
        self.given_up: list[int] = []

    def _call(self, which: int, number: int, timeout_s: float, max_tokens: int) -> Call:
        file = in_new_file(self._files[which], number)
        asked = request("<image>What is it?", file, max_tokens=max_tokens, request_id=f"number {number}")
        call: Call = self._server.inference.Generate(asked, timeout=timeout_s)
        return call

    def _ask(self, which: int, number: int) -> list[int]:
        return Answer(list(self._call(which, number, PATIENCE_S, 4))).token_ids

    def use(self, number: int) -> None:
        """One request: read to its end, or given up at some moment in one of three ways."""
        rng = random.Random(number)
        which = rng.randrange(len(self._files))
        if number % GIVEN_UP_OF:
            assert self._ask(which, number) == self._expected[which]
            return
        give_up = [self._cancel, self._abort, self._let_expire][number // GIVEN_UP_OF % 3]
        give_up(which, number, rng.uniform(0.001, MOMENT_MAX_S))
        self.given_up.append(number)

    def _cancel(self, which: int, number: int, moment_s: float) -> None:
        call = self._call(which, number, PATIENCE_S, LONG_TOKENS)
        time.sleep(moment_s)
        call.cancel()
        assert read_failing(call)[1].code() == grpc.StatusCode.CANCELLED

    def _abort(self, which: int, number: int, moment_s: float) -> None:
        call = self._call(which, number, PATIENCE_S, LONG_TOKENS)
        time.sleep(moment_s)
        wait_until(lambda: self._abort_by_name(number) == "aborted", PATIENCE_S, "the server knows it")
        assert read_failing(call)[1].code() == grpc.StatusCode.CANCELLED

    def _abort_by_name(self, number: int) -> str:
        name = pb.AbortRequest(request_id=f"number {number}")
        return self._server.control.Abort(name, timeout=PATIENCE_S).outcome

    def _let_expire(self, which: int, number: int, moment_s: float) -> None:
        call = self._call(which, number, moment_s, LONG_TOKENS)
        assert read_failing(call)[1].code() == grpc.StatusCode.DEADLINE_EXCEEDED


@dataclass(frozen=True)
class Use:
    """What one process has of the machine."""

    descriptors: int
    threads: int
    resident_bytes: int


def _used(server: LocalServer, names: Mapping[str, int]) -> dict[str, Use]:
    processes = {name: psutil.Process(server.processes.pid(name)) for name in names}
    return {name: Use(p.num_fds(), p.num_threads(), p.memory_info().rss) for name, p in processes.items()}


def assert_nothing_grows(
    server: LocalServer, num_requests: int, growth_max: Mapping[str, int], check_at_rest: Callable[[], None]
) -> None:
    """Three rounds of so many requests. The first fills caches and pools of threads.

    Args:
        growth_max: MiB that a process may grow by over the last round.
        check_at_rest: called after each round.
    """
    clients, seen = Clients(server), []
    with ThreadPoolExecutor(CLIENTS) as pool:
        for begin in range(0, 3 * num_requests, num_requests):
            list(pool.map(clients.use, range(begin, begin + num_requests)))
            wait_until(server.is_at_rest, PATIENCE_S, "everything given back")
            seen.append(_used(server, growth_max))
            check_at_rest()
    assert len(clients.given_up) == 3 * num_requests // GIVEN_UP_OF
    first, before, after = seen
    for name, most in growth_max.items():
        assert after[name].descriptors <= first[name].descriptors, seen
        assert after[name].threads <= first[name].threads + THREADS_MORE_MAX, seen
        assert after[name].resident_bytes - before[name].resident_bytes <= most << 20, seen
    gauges = server.gauges()
    assert gauges.kv_blocks_free == gauges.kv_blocks_total
    assert not server.processes.exited()
