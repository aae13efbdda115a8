"""One picture from its URL: each hop checked, resolved once, connected to what was checked, read under limits."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import cast
from urllib.parse import urljoin

from airside.vision_workers.fetch.addresses import Address, Resolver, resolve
from airside.vision_workers.fetch.connection import Connection, Deadline, TooMuchSent
from airside.vision_workers.fetch.guard import AllowList, Target, parse_url
from airside.vision_workers.image_error import Cause, ImageError

_READ_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_HEAD_BYTES_MAX = 128 << 10
_CHUNKING = 1 / 8  # of a file's size, beside it, for the frames of its chunks: enough from 48 bytes per chunk on


@functools.cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class FetchRules:
    """What may be fetched, and how long and how much. `resolve` and `make_tls` are the system's, but for tests."""

    allow_list: AllowList
    max_redirects: int
    timeout_s: float  # of one picture, redirects included
    max_bytes: int  # of one file
    resolve: Resolver = resolve
    make_tls: Callable[[], ssl.SSLContext] = _system_tls


class Download:
    """One picture on its way. Its time starts when it is made.

    Args:
        target: from `parse_url`.
        rules: of this server.
    """

    def __init__(self, target: Target, rules: FetchRules) -> None:
        self._target = target
        self._rules = rules
        self._deadline = Deadline(rules.timeout_s)

    def abort(self) -> None:
        """Ends the waiting of the thread in `run`, unless it is the resolver that it waits for."""
        self._deadline.end()

    def run(self) -> bytes:
        """The file. Neither its content nor its type has been looked at.

        Raises:
            ImageError: it cannot be had; the detail names no host, path or query.
        """
        try:
            return self._follow()
        except TimeoutError as error:
            raise timed_out(self._rules.timeout_s) from error
        except ssl.SSLCertVerificationError as error:
            raise _failed("its host's certificate cannot be verified") from error
        except ssl.SSLError as error:
            raise _failed("the encrypted connection to its host failed") from error
        except OSError as error:
            raise _failed(f"the connection to its host failed ({type(error).__name__})") from error
        except (HTTPException, ValueError) as error:  # ValueError: chunks of negative size
            raise _failed(f"its host does not speak HTTP as it should ({type(error).__name__})") from error
        except TooMuchSent as error:
            raise self._too_large() from error

    def _follow(self) -> bytes:
        target, redirects = self._target, 0
        while True:
            found = self._request(target)
            if isinstance(found, bytes):
                return found
            redirects += 1
            if redirects > self._rules.max_redirects:
                raise _failed(
                    f"its host redirects more than {self._rules.max_redirects} times (vision.media.max_redirects)"
                )
            if target.scheme == "https" and found.scheme != "https":
                raise ImageError(Cause.NOT_ALLOWED, "its host redirects from https to http")
            target = found

    def _request(self, target: Target) -> bytes | Target:
        """The file, or where it is instead."""
        allowed = self._rules.allow_list
        allowed.entry_for(target.host)
        addresses = allowed.permitted([target.address] if target.address else self._resolve(target.host))
        tls = self._rules.make_tls() if target.scheme == "https" else None
        connection = Connection(target, addresses, self._deadline, tls)
        try:
            connection.sendall(_request_bytes(target))
            # It asks for no more of a socket than `makefile`.
            with HTTPResponse(cast("object", connection), method="GET") as response:  # type: ignore[arg-type]
                _read_head(connection, response)
                if response.status in _REDIRECTS:
                    return _redirected(target, response.getheader("Location"))
                connection.allow(self._rules.max_bytes + int(self._rules.max_bytes * _CHUNKING))
                return self._read(response)
        finally:
            connection.close()

    def _resolve(self, host: str) -> list[Address]:
        try:
            return self._rules.resolve(host)
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:
            raise _failed("its host's name cannot be resolved") from error

    def _read(self, response: HTTPResponse) -> bytes:
        if response.status != 200:
            raise _failed(f"its host answers with status {response.status}")
        if response.getheader("Content-Encoding", "identity").strip().lower() not in ("identity", ""):
            raise _failed("its host sends it compressed, though asked not to")
        if response.getheader("Transfer-Encoding", "chunked").lower() != "chunked":  # all that http.client unpacks
            raise _failed("its host sends it in an unknown transfer encoding")
        expected = response.length
        if expected is not None and expected > self._rules.max_bytes:
            raise self._too_large()
        data = bytearray()
        while part := response.read(_READ_BYTES):
            if len(data) + len(part) > self._rules.max_bytes:
                raise self._too_large()
            data += part
        if expected is not None and len(data) < expected:
            raise _failed(f"the connection to its host broke off after {len(data)} of {expected} bytes")
        return bytes(data)

    def _too_large(self) -> ImageError:
        return ImageError(
            Cause.TOO_MANY_BYTES,
            f"the file at its URL has more than {self._rules.max_bytes} bytes, which is the limit (vision.limits)",
        )


def timed_out(timeout_s: float) -> ImageError:
    """For a picture that was not there in time."""
    return ImageError(Cause.FETCH_TIMEOUT, f"it could not be fetched within {timeout_s:g} s (vision.media.timeout_s)")


def _request_bytes(target: Target) -> bytes:
    lines = [
        f"GET {target.path} HTTP/1.1",
        f"Host: {target.host_header}",
        "User-Agent: airside",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _read_head(connection: Connection, response: HTTPResponse) -> None:
    connection.allow(_HEAD_BYTES_MAX)
    try:
        response.begin()
    except TooMuchSent as error:
        raise _failed(f"its host sends more than {_HEAD_BYTES_MAX} bytes of headers") from error


def _redirected(target: Target, location: str | None) -> Target:
    if not location:
        raise _failed("its host redirects to nowhere")
    try:
        location = location.strip().encode("latin-1").decode()  # as it was sent, where that is UTF-8
    except UnicodeError as error:
        raise _failed("its host redirects to what is no URL") from error
    return parse_url(urljoin(f"{target.scheme}://{target.host_header}{target.path}", location))


def _failed(detail: str) -> ImageError:
    return ImageError(Cause.FETCH_FAILED, detail)
