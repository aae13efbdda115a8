"""Fetching from hosts that are slow, endless, lying, or not who they say; against real sockets."""

from __future__ import annotations

import dataclasses
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_address

import psutil
import pytest
import trustme

from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.fetch.addresses import Address, resolve
from airside.vision_workers.fetch.download import FetchRules
from airside.vision_workers.fetch.fetcher import Fetched, Fetcher
from airside.vision_workers.fetch.guard import AllowList
from airside.vision_workers.image_error import Cause, ImageError
from tests.real_processes import wait_until
from tests.vision import picture_host
from tests.vision.picture_host import Handler, PictureHost, answer, chunked, raw, redirect

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


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(opened: ExitStack, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Fetching]]:
    """Makes a fetcher; after the test, no log line has a URL's query."""
    caplog.set_level("DEBUG")

    def make(fetch_rules: FetchRules | None, **bounds: int) -> Fetching:
        fetcher = Fetcher(fetch_rules, **bounds)
        opened.callback(fetcher.close)
        return Fetching(fetcher)

    yield make
    assert "sekrit" not in caplog.text


Start = Callable[..., Fetching]


def serve(opened: ExitStack, routes: dict[str, Handler], **options: object) -> PictureHost:
    return opened.enter_context(PictureHost(routes, **options))  # type: ignore[arg-type]


def get(start: Start, host: PictureHost, path: str, **options: object) -> Fetching:
    """Starts with the one URL, as number 0."""
    fetching = start(rules(**options))  # type: ignore[arg-type]
    fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}{path}?{SECRET}")
    return fetching


def test_a_picture_arrives(opened: ExitStack, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    host = serve(opened, {"/ok": answer(PICTURE)})
    fetching = get(start, host, "/ok")
    assert fetching.outcome(0) == PICTURE
    assert fetching.fetcher.num_open == 0
    request = host.requests[0].split("\r\n")
    assert request[0] == f"GET /ok?{SECRET} HTTP/1.1"
    assert f"Host: pictures.test:{host.port}" in request
    assert "Accept-Encoding: identity" in request
    assert not any(line.lower().startswith(("cookie", "authorization", "referer")) for line in request)


@pytest.mark.parametrize(
    "handler",
    [
        chunked(PICTURE[:1], PICTURE[1:5000], PICTURE[5000:]),
        raw(picture_host.head() + PICTURE),  # until the end of the connection
        raw(picture_host.head("200") + PICTURE),
        raw(picture_host.head("100 Continue") + picture_host.head(Content_Length=len(PICTURE)) + PICTURE),
        answer(PICTURE + b"more", Content_Length=len(PICTURE)),
        answer(PICTURE, Content_Type="text/html"),  # the bytes decide
        answer(PICTURE, Content_Encoding="identity"),
    ],
)
def test_what_servers_may_do(opened: ExitStack, start: Start, handler: Handler) -> None:
    assert get(start, serve(opened, {"/p": handler}), "/p").outcome(0) == PICTURE


BOMB = gzip.compress(bytes(50 << 20))


@pytest.mark.parametrize(
    ("handler", "cause", "detail"),
    [
        (picture_host.not_found, Cause.FETCH_FAILED, "status 404"),
        (answer(PICTURE, "206 Partial Content"), Cause.FETCH_FAILED, "status 206"),
        (answer(b"", "204 No Content"), Cause.FETCH_FAILED, "status 204"),
        (answer(b"", "500 Oh"), Cause.FETCH_FAILED, "status 500"),
        (answer(b"", "304 Not Modified"), Cause.FETCH_FAILED, "status 304"),
        (answer(BOMB, Content_Encoding="gzip"), Cause.FETCH_FAILED, "compressed"),
        (answer(BOMB, Content_Encoding="identity, gzip"), Cause.FETCH_FAILED, "compressed"),
        (answer(BOMB, Transfer_Encoding="gzip, chunked"), Cause.FETCH_FAILED, "transfer encoding"),
        (answer(PICTURE, Content_Length=len(PICTURE) + 1), Cause.FETCH_FAILED, "broke off after 10240 of 10241 bytes"),
        (answer(b"", Content_Length=MAX_BYTES + 1), Cause.TOO_MANY_BYTES, str(MAX_BYTES)),
        (raw(picture_host.head() + bytes(MAX_BYTES + 1)), Cause.TOO_MANY_BYTES, str(MAX_BYTES)),
        (chunked(*[bytes(1 << 16)] * 17), Cause.TOO_MANY_BYTES, str(MAX_BYTES)),
        (picture_host.endless, Cause.TOO_MANY_BYTES, str(MAX_BYTES)),
        (picture_host.endless_chunk_of_minus_one, Cause.TOO_MANY_BYTES, str(MAX_BYTES)),
        (picture_host.endless_continue, Cause.FETCH_FAILED, "131072 bytes of headers"),
        (raw(b"HTTP/1.1 200 OK\r\n" + (b"X: " + b"x" * 60_000 + b"\r\n") * 3), Cause.FETCH_FAILED, "of headers"),
        (raw(picture_host.head(Transfer_Encoding="chunked") + b"5\r\nabc"), Cause.FETCH_FAILED, "IncompleteRead"),
        (raw(picture_host.head(Transfer_Encoding="chunked") + b"zz\r\n"), Cause.FETCH_FAILED, "IncompleteRead"),
        (raw(picture_host.head(Transfer_Encoding="chunked") + b"-9\r\nabc"), Cause.FETCH_FAILED, "not speak HTTP"),
        (raw(b"\x89PNG\r\n\x1a\n"), Cause.FETCH_FAILED, "BadStatusLine"),
        (raw(b""), Cause.FETCH_FAILED, "RemoteDisconnected"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 70_000 + b"\r\n"), Cause.FETCH_FAILED, "LineTooLong"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 200 + b"\r\n"), Cause.FETCH_FAILED, "HTTPException"),
    ],
)
def test_what_servers_may_not_do(opened: ExitStack, start: Start, handler: Handler, cause: Cause, detail: str) -> None:
    refusal = get(start, serve(opened, {"/p": handler}), "/p").refusal(0)
    assert refusal.cause is cause
    assert detail in refusal.detail


@pytest.mark.parametrize(
    "handler", [picture_host.drip_body, picture_host.drip_headers, picture_host.silent], ids=["body", "headers", "none"]
)
def test_the_time_limit_is_one_for_all_reads(opened: ExitStack, start: Start, handler: Handler) -> None:
    host = serve(opened, {"/p": handler})
    refusal = get(start, host, "/p", timeout_s=0.3).refusal(0)
    assert refusal.cause is Cause.FETCH_TIMEOUT
    assert "0.3 s" in refusal.detail
    assert host.left.acquire(timeout=30)  # the connection is closed too


def test_a_host_that_does_not_listen(start: Start, opened: ExitStack) -> None:
    host = serve(opened, {})
    with PictureHost({}) as gone:
        port = gone.port
    fetching = start(rules(names=Names(pictures_test="127.0.0.1", good_test="127.0.0.9 127.0.0.1")))
    fetching.fetcher.start(key(0), f"http://pictures.test:{port}/")
    assert "ConnectionRefusedError" in fetching.refusal(0).detail
    fetching.fetcher.start(key(1), f"http://slow.test:{port}/")
    assert "cannot be resolved" in fetching.refusal(1).detail
    fetching = start(rules("good.test", "127.0.0.1", "127.0.0.9", names=Names(good_test="127.0.0.9 127.0.0.1")))
    fetching.fetcher.start(key(2), f"http://good.test:{host.port}/")
    assert "404" in fetching.refusal(2).detail  # the second address


# --- redirects --------------------------------------------------------------------------------------------------------


def test_redirects_are_followed_as_far_as_allowed(opened: ExitStack, start: Start) -> None:
    statuses = ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
    routes = {f"/{i}": redirect(f"{i + 1}?{SECRET} ", status) for i, status in enumerate(statuses)}
    host = serve(opened, {**routes, "/5": answer(PICTURE)})
    assert get(start, host, "/0", max_redirects=5).outcome(0) == PICTURE
    refusal = get(start, host, "/0", max_redirects=4).refusal(0)
    assert refusal.cause is Cause.FETCH_FAILED
    assert "more than 4 times" in refusal.detail
    assert "more than 0 times" in get(start, host, "/4").refusal(0).detail


def test_a_loop_of_redirects_ends(opened: ExitStack, start: Start) -> None:
    host = serve(opened, {"/a": redirect("/b"), "/b": redirect("/a")})
    assert "more than 10 times" in get(start, host, "/a", max_redirects=10).refusal(0).detail
    assert host.num_connections == 11


@pytest.mark.parametrize(
    "location",
    [
        "http://elsewhere.test:{port}/ok",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:127.0.0.1]:{port}/ok",
        "http://2130706433:{port}/ok",
        "http://127.0.0.2:{port}/ok",
        "http://pictures.test@elsewhere.test:{port}/ok",
        "//elsewhere.test:{port}/ok",
        "file:///etc/hostname",
        "http://inside.pictures.test:{port}/ok",  # on the list, and points into the private network
    ],
)
def test_each_redirect_is_checked_again(opened: ExitStack, start: Start, location: str) -> None:
    host = serve(opened, {"/r": picture_host.redirect_to_query, "/ok": answer(PICTURE)})
    names = Names(pictures_test="127.0.0.1", inside_pictures_test="10.0.0.1", elsewhere_test="127.0.0.1")
    fetching = start(rules("pictures.test", "*.pictures.test", "127.0.0.1", names=names, max_redirects=5))
    fetching.fetcher.start(key(0), f"http://pictures.test:{host.port}/r?" + location.format(port=host.port))
    assert fetching.refusal(0).cause is Cause.NOT_ALLOWED
    assert host.num_connections == 1


@pytest.mark.parametrize("fields", [{}, {"Location": ""}, {"Location": "\xff\xfe"}])
def test_a_redirect_to_nowhere(opened: ExitStack, start: Start, fields: dict[str, str]) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    host = serve(opened, {"/r": raw(f"HTTP/1.1 302 Found\r\n{lines}\r\n".encode("latin-1"))})
    refusal = get(start, host, "/r", max_redirects=5).refusal(0)
    assert refusal.cause is Cause.FETCH_FAILED
    assert "redirects to" in refusal.detail


# --- names and addresses ----------------------------------------------------------------------------------------------


def test_a_name_is_resolved_once_and_what_was_checked_is_connected_to(opened: ExitStack, start: Start) -> None:
    host = serve(opened, {"/ok": answer(PICTURE)})
    names = Names(pictures_test="127.0.0.1 then 10.0.0.1")
    assert get(start, host, "/ok", names=names).outcome(0) == PICTURE
    assert names.asked == ["pictures.test"]


def test_a_name_that_points_inside_is_not_connected_to(opened: ExitStack, start: Start) -> None:
    host = serve(opened, {"/ok": answer(PICTURE)}, address="127.0.0.2")
    names = Names(pictures_test="127.0.0.2 then 127.0.0.1")
    assert get(start, host, "/ok", names=names).refusal(0).cause is Cause.NOT_ALLOWED
    assert (host.num_connections, names.asked) == (0, ["pictures.test"])


def test_a_listed_address_and_localhost_can_be_fetched_from(opened: ExitStack, start: Start) -> None:
    host = serve(opened, {"/ok": answer(PICTURE)})
    for entry, name in [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("localhost", "LOCALHOST.")]:
        fetching = start(rules(entry, names=resolve))
        fetching.fetcher.start(key(0), f"http://{name}:{host.port}/ok")
        assert fetching.outcome(0) == PICTURE
    fetching = start(rules("pictures.test", names=resolve))
    fetching.fetcher.start(key(0), f"http://127.0.0.1:{host.port}/ok")
    assert fetching.refusal(0).cause is Cause.NOT_ALLOWED
    assert host.num_connections == 3


def test_https_keeps_the_name(opened: ExitStack, start: Start) -> None:
    authority = trustme.CA()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("pictures.test").configure_cert(server_side)
    asked: list[str | None] = []
    server_side.sni_callback = lambda _, name, __: asked.append(name)
    host = serve(opened, {"/ok": answer(PICTURE), "/down": redirect("http://pictures.test:8080/")}, tls=server_side)
    names = Names(pictures_test="127.0.0.1", good_test="127.0.0.1")
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)
    trusting = rules(names=names, tls=client_side, max_redirects=1)
    fetching = start(trusting)
    fetching.fetcher.start(key(0), f"https://pictures.test:{host.port}/ok")
    assert fetching.outcome(0) == PICTURE
    assert asked == ["pictures.test"]
    fetching.fetcher.start(key(1), f"https://good.test:{host.port}/ok?{SECRET}")  # not the certificate's name
    assert "certificate" in fetching.refusal(1).detail
    fetching.fetcher.start(key(2), f"https://pictures.test:{host.port}/down")
    assert "from https to http" in fetching.refusal(2).detail
    distrusting = start(rules(names=names))
    distrusting.fetcher.start(key(3), f"https://pictures.test:{host.port}/ok?{SECRET}")
    assert "certificate" in distrusting.refusal(3).detail
    plain = serve(opened, {}, greeting=picture_host.head("400 Bad Request"))
    fetching.fetcher.start(key(4), f"https://pictures.test:{plain.port}/ok")
    assert "encrypted connection" in fetching.refusal(4).detail


# --- many at once -----------------------------------------------------------------------------------------------------


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
    fetching = start(rules(timeout_s=0.3), threads_max=2, threads_per_entry_max=2)
    for number, url in enumerate(slow_urls(host, "slow.test", 40)):
        fetching.fetcher.start(key(number), url)
    assert {fetching.refusal(number).cause for number in range(40)} == {Cause.FETCH_TIMEOUT}
    assert host.num_connections == 2
    fetching.fetcher.start(key(40), f"http://good.test:{host.port}/ok")
    assert fetching.outcome(40) == PICTURE


def test_cancel_wakes_the_thread_and_leaves_no_outcome(host: PictureHost, start: Start) -> None:
    fetching = start(rules(), threads_max=1, threads_per_entry_max=1)
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
    assert (fetching.fetcher.num_open, host.num_connections) == (0, 2)
    fetching.fetcher.start(key(0), last)  # the same key again
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
    """To a host that takes no connection: its queue of those is full."""
    listener = opened.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port = listener.getsockname()[1]
    for _ in range(4):
        waiting = opened.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(("127.0.0.1", port))
    fetching = start(rules(), threads_max=1)
    fetching.fetcher.start(key(0), f"http://pictures.test:{port}/ok")
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
