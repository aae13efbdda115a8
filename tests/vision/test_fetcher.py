"""Many pictures fetched at once: slow ones, cancelled ones, and what they leave behind."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack
from ipaddress import ip_address

import psutil
import pytest

from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.fetch.addresses import Address
from airside.vision_workers.fetch.fetcher import Fetcher
from airside.vision_workers.image_error import Cause, ImageError
from tests.real_processes import wait_until
from tests.vision import picture_host
from tests.vision.fetching import (
    PICTURE,
    SECRET,
    Fetching,
    Names,
    Start,
    key,
    num_connecting,
    port_that_hangs,
    rules,
    serve,
)
from tests.vision.picture_host import PictureHost, answer


def slow_urls(host: PictureHost, name: str, count: int) -> list[str]:
    return [f"http://{name}:{host.port}/slow?{SECRET}&n={n}" for n in range(count)]


@pytest.fixture
def host(opened: ExitStack) -> PictureHost:
    return serve(opened, {"/slow": picture_host.drip_body, "/ok": answer(PICTURE)})


def test_slow_pictures_do_not_stop_a_good_one(host: PictureHost, start: Start) -> None:
    fetching = start(rules(), threads_max=8, threads_per_entry_max=6)
    for number, url in enumerate(slow_urls(host, "slow.test", 50)):
        fetching.fetcher.start(key(number), url)
    fetching.fetcher.start(key(50), f"http://good.test:{host.port}/ok")
    assert fetching.outcome(50) == PICTURE
    assert not any(fetching.has(number) for number in range(50))
    assert fetching.fetcher.num_open == 50


def test_slow_pictures_of_one_host_do_not_stop_a_good_one_of_it(host: PictureHost, start: Start) -> None:
    fetching = start(rules())
    for number, url in enumerate(slow_urls(host, "pictures.test", 50)):
        fetching.fetcher.start(key(number), url)
    fetching.fetcher.start(key(50), f"http://pictures.test:{host.port}/ok")
    assert fetching.outcome(50) == PICTURE
    assert fetching.fetcher.num_open == 50


def test_waiting_for_a_thread_has_an_end_too(host: PictureHost, start: Start) -> None:
    fetching = start(rules(timeout_s=0.3), threads_max=2)
    for number, url in enumerate(slow_urls(host, "slow.test", 40)):
        fetching.fetcher.start(key(number), url)
    assert {fetching.refusal(number).cause for number in range(40)} == {Cause.FETCH_TIMEOUT}
    assert host.num_connections == 2
    fetching.fetcher.start(key(40), f"http://good.test:{host.port}/ok")
    assert fetching.outcome(40) == PICTURE


def test_cancel_wakes_the_thread_and_leaves_no_outcome(host: PictureHost, start: Start) -> None:
    names = Names(pictures_test="127.0.0.1")
    fetching = start(rules(names=names), threads_max=1)
    running, waiting, last = (f"http://pictures.test:{host.port}/{what}" for what in ("slow", "slow", "ok"))
    for number, url in enumerate([running, waiting, last]):
        fetching.fetcher.start(key(number), url)
    wait_until(lambda: bool(host.requests), 30, "the first request")
    fetching.fetcher.cancel(key(1))
    fetching.fetcher.cancel(key(0))
    fetching.fetcher.cancel(key(77))
    assert host.left.acquire(timeout=30)
    assert fetching.outcome(2) == PICTURE
    assert not fetching.has(0)
    assert not fetching.has(1)
    assert (fetching.fetcher.num_open, host.num_connections, len(names.asked)) == (0, 2, 2)
    fetching.fetcher.start(key(0), last)  # the same key again
    assert fetching.outcome(0) == PICTURE


def test_a_late_end_of_a_cancelled_picture_is_not_that_of_the_next(host: PictureHost, start: Start) -> None:
    fetching = start(rules())
    fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/slow")
    wait_until(lambda: bool(host.requests), 30, "the request")
    fetching.fetcher.cancel(key(0))
    wait_until(lambda: not fetch_threads(), 30, "the end of the thread")
    fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/ok")
    assert fetching.outcome(0) == PICTURE


def test_the_same_key_twice_is_one_picture(host: PictureHost, start: Start) -> None:
    fetching = start(rules())
    for _ in range(2):
        fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/ok")
    assert fetching.outcome(0) == PICTURE
    assert (fetching.fetcher.num_open, host.num_connections) == (0, 1)


def test_a_resolver_that_hangs_holds_up_its_own_host_only(host: PictureHost, start: Start, opened: ExitStack) -> None:
    gate = threading.Event()
    opened.callback(gate.set)

    def hanging(name: str) -> list[Address]:
        if name == "slow.test":
            gate.wait(120)
        return [ip_address("127.0.0.1")]

    fetching = start(rules(names=hanging, timeout_s=0.3), threads_max=3, threads_per_entry_max=2)
    for number in range(4):
        fetching.fetcher.start(key(number), f"http://slow.test:{host.port}/ok")
    assert {fetching.refusal(number).cause for number in range(4)} == {Cause.FETCH_TIMEOUT}
    fetching.fetcher.start(key(4), f"http://good.test:{host.port}/ok")
    assert fetching.outcome(4) == PICTURE
    fetching.fetcher.close()  # waits for nobody: the resolver still hangs


def test_refusals_need_no_thread(start: Start) -> None:
    fetching = start(rules(), threads_max=0, threads_per_entry_max=0)
    fetching.fetcher.start(key(0), f"http://elsewhere.test/?{SECRET}")
    fetching.fetcher.start(key(1), f"ftp://pictures.test/?{SECRET}")
    fetching.fetcher.start(key(2), "http://elsewhere.test/")
    fetching.fetcher.cancel(key(2))
    assert fetching.fetcher.num_open == 2
    assert fetching.refusal(0).cause is Cause.NOT_ALLOWED
    assert fetching.refusal(1).cause is Cause.NOT_ALLOWED
    assert fetching.fetcher.num_open == 0


def test_settings_decide(host: PictureHost) -> None:
    settings = VisionWorkerSettings("", "", "", "", 0, max_bytes=len(PICTURE), max_pixels=1, max_aspect=1.0)
    off = Fetching(Fetcher.of(settings))
    off.fetcher.start(key(0), f"http://127.0.0.1:{host.port}/ok")
    assert "vision.media.allow_urls" in off.refusal(0).detail
    for allowed, max_bytes, expected in [
        (["127.0.0.1"], len(PICTURE), PICTURE),
        (["127.0.0.1"], len(PICTURE) - 1, Cause.TOO_MANY_BYTES),
        (["localhost"], len(PICTURE), Cause.NOT_ALLOWED),
    ]:
        on = dataclasses.replace(settings, allow_urls=True, allowed_domains=allowed, max_bytes=max_bytes)
        fetching = Fetching(Fetcher.of(on))
        fetching.fetcher.start(key(0), f"http://127.0.0.1:{host.port}/ok")
        outcome = fetching.outcome(0)
        assert (outcome.cause if isinstance(outcome, ImageError) else outcome) == expected


def test_an_unforeseen_error_fails_one_picture_and_tells_no_url(
    start: Start, host: PictureHost, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> list[Address]:
        raise RuntimeError(f"{name}?{SECRET}")

    fetching = start(rules(names=broken))
    fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/ok?{SECRET}")
    assert fetching.refusal(0).cause is Cause.INTERNAL
    assert "RuntimeError" in caplog.text


def test_a_machine_without_another_thread(
    start: Start, host: PictureHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fetching = start(rules())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/ok?{SECRET}")
    assert fetching.refusal(0).cause is Cause.INTERNAL
    assert "no thread" in caplog.text
    fetching.fetcher.start(key(1), f"http://pictures.test:{host.port}/ok")
    assert fetching.outcome(1) == PICTURE


def test_cancel_wakes_a_thread_that_connects(start: Start, host: PictureHost, opened: ExitStack) -> None:
    fetching = start(rules(), threads_max=1)
    fetching.fetcher.start(key(0), f"http://pictures.test:{port_that_hangs(opened)}/ok")
    wait_until(lambda: num_connecting("127.0.0.1") == 2, 30, "a second one that does not come through")
    fetching.fetcher.start(key(1), f"http://good.test:{host.port}/ok")
    fetching.fetcher.cancel(key(0))
    assert fetching.outcome(1) == PICTURE  # in the only thread


def test_nothing_is_left_open(start: Start, host: PictureHost) -> None:
    """Neither by pictures that arrive, nor by those that fail, nor by those that are cancelled."""
    fetching = start(rules(max_redirects=2))
    fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/ok")
    fetching.outcome(0)
    files = psutil.Process().num_fds
    wait_until(lambda: not fetch_threads(), 30, "the end of the thread")
    before = files()
    for number in range(1, 40, 3):
        fetching.fetcher.start(key(number), f"http://pictures.test:{host.port}/ok")
        fetching.fetcher.start(key(number + 1), f"http://pictures.test:{host.port}/none")
        fetching.fetcher.start(key(number + 2), f"http://pictures.test:{host.port}/slow")
    for number in range(1, 40, 3):
        fetching.outcome(number)
        fetching.refusal(number + 1)
        fetching.fetcher.cancel(key(number + 2))
    wait_until(lambda: not fetch_threads(), 30, "the end of all threads")
    wait_until(lambda: files() == before, 30, "all sockets closed")


def fetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fetch"]
