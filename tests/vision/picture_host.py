"""A web server on a loopback address that behaves as told, also in ways no library would let it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

Handler = Callable[["PictureHost", socket.socket, str], None]
"""(host, connection, path with query)"""

DRIP_BYTES = 100_000


class PictureHost:
    """Listens until the block ends. Each connection has a thread; all are woken at the end.

    Args:
        routes: handler by path. Others are answered with 404.
        address: to bind, of the loopback network.
        tls: the server's side, for https.
        greeting: said at once, before any request.
    """

    def __init__(
        self,
        routes: dict[str, Handler],
        address: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        greeting: bytes = b"",
    ) -> None:
        self._routes = routes
        self._tls = tls
        self._greeting = greeting
        self._listener = socket.create_server((address, 0))
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[str] = []
        """The head of each request that came."""
        self.num_connections = 0
        self.over = threading.Event()
        """The block has ended."""
        self.left = threading.Semaphore(0)
        """Released for each client that went before its answer was complete."""

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            stack.callback(connection.close)
            connection.sendall(self._greeting)
            head = b""
            while b"\r\n\r\n" not in head:
                part = connection.recv(65536)
                if not part:
                    return
                head += part
            self.requests.append(head.decode())
            path = self.requests[-1].split(" ")[1]
            self._routes.get(path.partition("?")[0], not_found)(self, connection, path)

    def drip(self, connection: socket.socket, data: bytes, every_s: float = 0.05) -> None:
        """Sends the same byte by byte, again and again, until the client goes or the block ends."""
        try:
            while not self.over.wait(every_s):
                connection.sendall(data)
        except OSError:
            self.left.release()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        for open_socket in [self._listener, *self._connections]:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
        until = time.monotonic() + 30
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), "a handler does not end"


def head(status: str = "200 OK", **fields: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def not_found(_: PictureHost, connection: socket.socket, __: str) -> None:
    body = b"<html>no such picture</html>"
    connection.sendall(head("404 Not Found", Content_Type="text/html", Content_Length=len(body)) + body)


def answer(body: bytes, status: str = "200 OK", **fields: object) -> Handler:
    """Sends this, with its length unless `fields` says otherwise."""

    def handler(_: PictureHost, connection: socket.socket, __: str) -> None:
        connection.sendall(head(status, **{"Content_Length": len(body), **fields}) + body)

    return handler


def raw(data: bytes) -> Handler:
    """Sends exactly this."""

    def handler(_: PictureHost, connection: socket.socket, __: str) -> None:
        connection.sendall(data)

    return handler


def chunked(*chunks: bytes) -> Handler:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
    return raw(head(Transfer_Encoding="chunked") + body)


def redirect(location: str, status: str = "302 Found") -> Handler:
    return answer(b"", status, Location=location)


def redirect_to_query(_: PictureHost, connection: socket.socket, path: str) -> None:
    """To what the query says."""
    connection.sendall(head("302 Found", Location=path.partition("?")[2]))


def silent(host: PictureHost, connection: socket.socket, _: str) -> None:
    """Takes the request, and says nothing until the client goes or the block ends."""
    if connection.recv(1) == b"" and not host.over.is_set():
        host.left.release()


def drip_body(host: PictureHost, connection: socket.socket, _: str) -> None:
    connection.sendall(head(Content_Length=DRIP_BYTES))
    host.drip(connection, b"x")


def drip_headers(host: PictureHost, connection: socket.socket, _: str) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    host.drip(connection, b"x")


def endless(host: PictureHost, connection: socket.socket, _: str) -> None:
    """As much as the client takes, of no stated length."""
    connection.sendall(head())
    host.drip(connection, bytes(1 << 16), every_s=0)


def endless_continue(host: PictureHost, connection: socket.socket, _: str) -> None:
    host.drip(connection, head("100 Continue") * 100, every_s=0)


def endless_chunk_of_minus_one(host: PictureHost, connection: socket.socket, _: str) -> None:
    connection.sendall(head(Transfer_Encoding="chunked") + b"-1\r\n")
    host.drip(connection, bytes(1 << 16), every_s=0)
