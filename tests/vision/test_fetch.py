"""Fetching from hosts that are slow, endless, lying, or not who they say; against real sockets."""

from __future__ import annotations

import gzip
import ssl
from contextlib import ExitStack

import pytest
import trustme

from airside.vision_workers.fetch.addresses import resolve
from airside.vision_workers.fetch.download import Download
from airside.vision_workers.fetch.guard import parse_url
from airside.vision_workers.image_error import Cause, ImageError
from tests.vision import picture_host
from tests.vision.fetching import (
    MAX_BYTES,
    PICTURE,
    SECRET,
    Fetching,
    Names,
    Start,
    key,
    port_that_hangs,
    rules,
    serve,
)
from tests.vision.picture_host import Handler, PictureHost, answer, chunked, raw, redirect


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
    assert {"Accept-Encoding: identity", "Connection: close"} <= set(request)
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


@pytest.mark.parametrize("handler", [picture_host.drip_body, picture_host.drip_headers, picture_host.silent])
def test_a_download_ends_by_itself(opened: ExitStack, handler: Handler) -> None:
    host = serve(opened, {"/p": handler})
    with pytest.raises(ImageError) as failed:
        Download(parse_url(f"http://pictures.test:{host.port}/p"), rules(timeout_s=0.3)).run()
    assert failed.value.cause is Cause.FETCH_TIMEOUT


@pytest.mark.parametrize("chunk", [None, 48])
def test_the_largest_file_arrives(opened: ExitStack, start: Start, chunk: int | None) -> None:
    file = bytes(MAX_BYTES)
    whole = answer(file) if chunk is None else chunked(*[file[:chunk]] * (MAX_BYTES // chunk))
    outcome = get(start, serve(opened, {"/p": whole}), "/p").outcome(0)
    assert isinstance(outcome, bytes)
    assert len(outcome) == MAX_BYTES // (chunk or 1) * (chunk or 1)


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


def test_an_address_that_hangs_leaves_time_for_the_next(start: Start, opened: ExitStack) -> None:
    host = serve(opened, {"/ok": answer(PICTURE)})
    port_that_hangs(opened, "127.0.0.9", host.port)
    allowed = ("good.test", "127.0.0.1", "127.0.0.9")
    fetching = start(rules(*allowed, names=Names(good_test="127.0.0.9 127.0.0.1"), timeout_s=4.0))
    fetching.fetcher.start(key(0), f"http://good.test:{host.port}/ok")
    assert fetching.outcome(0) == PICTURE


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
