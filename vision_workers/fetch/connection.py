"""A connection to an address that was checked, every wait of which ends at one deadline."""

from __future__ import annotations

import io
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import cast

from airside.vision_workers.fetch.addresses import Address
from airside.vision_workers.fetch.guard import Target


class Deadline:
    """A moment that nothing waits beyond. `end` brings it about from another thread.

    Args:
        timeout_s: from now on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def remaining_s(self) -> float:
        """More than 0. Raises TimeoutError once it has passed."""
        remaining = self._at - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        return remaining

    def watch(self, watched: socket.socket) -> None:
        """The socket that `end` wakes. Raises TimeoutError once it has passed."""
        with self._lock:
            self._socket = watched
        self.remaining_s()

    def forget(self) -> None:
        """Before that socket is closed, since its number may then be another's."""
        with self._lock:
            self._socket = None

    def end(self) -> None:
        """Now. Whoever waits for the socket wakes up."""
        with self._lock:
            self._at = time.monotonic()
            if self._socket is not None:
                try:
                    # The plain method: TLS's own would take the session from under the thread that reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:  # not connected yet, or not any more
                    return


class Connection:
    """Connected to one of the addresses, and for https encrypted with the host's name checked.

    Args:
        target: its host goes into TLS's server name and is looked for in the certificate.
        addresses: tried in order; the time left is divided among them.

    Raises:
        OSError: none of them answers, or TLS fails; TimeoutError once the deadline has passed.
    """

    def __init__(
        self, target: Target, addresses: Sequence[Address], deadline: Deadline, tls: ssl.SSLContext | None
    ) -> None:
        self._deadline = deadline
        self._socket = self._connect(target.port, addresses)
        if tls is not None:
            self._encrypt(tls, target.host)
        self._reader = _Reader(self._socket, deadline)

    def _connect(self, port: int, addresses: Sequence[Address]) -> socket.socket:
        failed: OSError = OSError("no address")
        for index, address in enumerate(addresses):
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            try:
                candidate = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # this machine has no IPv6
                failed = error
                continue
            try:
                self._deadline.watch(candidate)
                candidate.settimeout(self._deadline.remaining_s() / (len(addresses) - index))
                candidate.connect((str(address), port))
                return candidate
            except OSError as error:
                failed = error
                self._drop(candidate)
        raise failed

    def _encrypt(self, tls: ssl.SSLContext, host: str) -> None:
        plain = self._socket
        try:
            plain.settimeout(self._deadline.remaining_s())
            wrapped = tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        except OSError:
            self._drop(plain)
            raise
        self._socket = wrapped
        try:
            self._deadline.watch(wrapped)
            wrapped.do_handshake()
        except OSError:
            self.close()
            raise

    def sendall(self, data: bytes) -> None:
        """Raises OSError."""
        self._socket.settimeout(self._deadline.remaining_s())
        self._socket.sendall(data)

    def allow(self, num_bytes: int) -> None:
        """So many more bytes may come; at first none may."""
        self._reader.bytes_left += num_bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        """What `http.client` reads from. Its reads raise OSError, and TooMuchSent."""
        assert mode == "rb"
        return io.BufferedReader(self._reader)

    def close(self) -> None:
        """At once, whatever was still to come."""
        self._drop(self._socket)

    def _drop(self, dropped: socket.socket) -> None:
        self._deadline.forget()
        dropped.close()


class _Reader(io.RawIOBase):
    """Reads that wait as long as the deadline leaves, however the bytes trickle in.

    It counts them too: `http.client` skips any number of interim answers, and takes a chunk of size -1 for all that
    there is.
    """

    def __init__(self, source: socket.socket, deadline: Deadline) -> None:
        self._source = source
        self._deadline = deadline
        self.bytes_left = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        self._source.settimeout(self._deadline.remaining_s())
        count = self._source.recv_into(cast("memoryview", buffer))
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise TooMuchSent
        return count


class TooMuchSent(Exception):
    """More bytes came than `Connection.allow` was told."""
