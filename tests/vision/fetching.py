"""What the tests of fetching share: names, rules, and the waiting for outcomes."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address

import psutil

from airside.vision_workers.fetch.addresses import Address
from airside.vision_workers.fetch.download import FetchRules
from airside.vision_workers.fetch.fetcher import Fetched, Fetcher
from airside.vision_workers.fetch.guard import AllowList
from airside.vision_workers.image_error import ImageError
from tests.vision.picture_host import Handler, PictureHost

PICTURE = bytes(range(256)) * 40  # nothing here looks inside
MAX_BYTES = 1 << 20
SECRET = "token=sekrit"

Key = tuple[int, int, int]


def key(number: int) -> Key:
    return number, 0, 1


class Names:
    """A resolver under the tests' control: what it is told, each answer once, the last one for ever."""

    def __init__(self, **answers: str) -> None:
        self._answers = {name.replace("_", "."): _addresses(text) for name, text in answers.items()}
        self.asked: list[str] = []

    def __call__(self, host: str) -> list[Address]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise OSError(f"no such host: {host}")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def _addresses(text: str) -> list[list[Address]]:
    return [[ip_address(address) for address in answer.split()] for answer in text.split("then")]


NAMES = {"pictures_test": "127.0.0.1", "good_test": "127.0.0.1", "slow_test": "127.0.0.1"}


def rules(
    *entries: str,
    names: Callable[[str], list[Address]] | None = None,
    timeout_s: float = 60.0,
    max_redirects: int = 0,
    tls: ssl.SSLContext | None = None,
) -> FetchRules:
    allowed = AllowList(entries or ("pictures.test", "good.test", "slow.test", "127.0.0.1"))
    context = tls or ssl.create_default_context()
    return FetchRules(allowed, max_redirects, timeout_s, MAX_BYTES, names or Names(**NAMES), lambda: context)


class Fetching:
    """A fetcher, and the waiting that its loop would do."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self._taken: dict[Key, Fetched] = {}

    def outcome(self, number: int) -> bytes | ImageError:
        until = time.monotonic() + 60
        while key(number) not in self._taken:
            assert time.monotonic() < until, "no outcome"
            for fetched in self.fetcher.take():
                assert fetched.key not in self._taken, "two outcomes"
                self._taken[fetched.key] = fetched
            time.sleep(0.005)
        return self._taken[key(number)].outcome

    def refusal(self, number: int) -> ImageError:
        outcome = self.outcome(number)
        assert isinstance(outcome, ImageError), f"{len(outcome)} bytes"
        assert not any(word in outcome.detail for word in ("sekrit", ".test", "127.0.0.1", "10.0.0", "169.254", "/"))
        return outcome

    def has(self, number: int) -> bool:
        return key(number) in self._taken


Start = Callable[..., Fetching]


def serve(opened: ExitStack, routes: dict[str, Handler], **options: object) -> PictureHost:
    return opened.enter_context(PictureHost(routes, **options))  # type: ignore[arg-type]


def port_that_hangs(opened: ExitStack, address: str = "127.0.0.1", port: int = 0) -> int:
    """Where nobody takes connections, as many as may wait for that do, and one more does not come through."""
    listener = opened.enter_context(socket.socket())
    listener.bind((address, port))
    listener.listen(0)
    where = listener.getsockname()
    while not num_connecting(address):
        waiting = opened.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(where)
    return int(where[1])


def num_connecting(address: str) -> int:
    connections = psutil.Process().net_connections("tcp4")
    return sum(c.status == psutil.CONN_SYN_SENT and c.raddr[0] == address for c in connections)
