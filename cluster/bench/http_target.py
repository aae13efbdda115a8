"""Any server with OpenAI's `/v1/completions` as a target. Plain sockets: the client takes little of the machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from airside.cluster.bench.streams import StreamTimes, TargetError

_LINE_BYTES_MAX = 1 << 22
_SHOWN = 500  # characters of an answer, in an error


class HttpTarget:
    """A server by the URL of its API.

    Args:
        url: "http://127.0.0.1:8000/v1".
        model: its name there; None: the first that the server lists.
        timeout_s: for any one line of an answer.
    Raises:
        TargetError: no such URL can be.
    """

    def __init__(self, url: str, model: str | None = None, timeout_s: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise TargetError(f"{url}: must be like http://HOST:PORT/v1 (https is not spoken here)")
        self._host, self._port = parts.hostname, parts.port or 80
        self._base = parts.path.rstrip("/")
        self._model = model
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Finds the model's name, if it was not given."""
        if self._model is not None:
            return
        body = "\n".join([line async for line in self._lines("GET", "/models", None)])
        try:
            self._model = str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise TargetError(
                f"{self._base}/models lists no model; name it with --served-model: {body[:_SHOWN]}"
            ) from error

    async def stream(self, prompt: list[int], num_tokens: int) -> StreamTimes:
        """See `Target`."""
        request = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,  # not OpenAI's, but known to most
        }
        times = StreamTimes(time.perf_counter())
        is_whole = False
        async for line in self._lines("POST", "/completions", request):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                is_whole = True
            elif data != line.strip():
                is_whole |= self._take(times, data)
        times.ended = time.perf_counter()
        if not is_whole:  # where the end of the connection is the end of the body, nothing else tells
            raise self._closed()
        if not times.came:
            raise TargetError(f"{self._base}/completions: an answer without any text")
        times.num_tokens = times.num_tokens or len(times.came)
        return times

    async def close(self) -> None:
        """Every request has had a connection of its own."""

    def _take(self, times: StreamTimes, data: str) -> bool:
        """Notes what came in an event; returns whether it was the last with text."""
        try:
            event = json.loads(data)
        except ValueError as error:
            raise TargetError(
                f"{self._base}/completions: an event that is not JSON, or broke off: {data[:_SHOWN]}"
            ) from error
        if "error" in event:
            raise TargetError(f"{self._base}/completions: {json.dumps(event['error'])[:_SHOWN]}")
        choices = event.get("choices") or []
        if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
            times.came.append(time.perf_counter())  # a token without a text, half a character, counts too
        usage = event.get("usage")
        if usage:
            times.num_tokens = usage.get("completion_tokens") or 0
            times.prompt_tokens = usage.get("prompt_tokens")
        return bool(choices and choices[0].get("finish_reason"))

    async def _lines(self, method: str, path: str, request: dict[str, Any] | None) -> AsyncIterator[str]:
        """The lines of an answer's body, as they come."""
        body = b"" if request is None else json.dumps(request).encode()
        head = (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=_LINE_BYTES_MAX)
        except OSError as error:
            raise TargetError(f"no server answers at {self._host}:{self._port}: {error}") from error
        try:
            writer.write(head.encode() + body)
            status = (await self._line(reader)).decode(errors="replace")
            is_chunked, size = False, None
            while header := (await self._line(reader)).strip().lower():
                is_chunked |= header.startswith(b"transfer-encoding:") and b"chunked" in header
                name, _, value = header.partition(b":")
                size = int(value) if name == b"content-length" and value.strip().isdigit() else size
            parts = self._chunks(reader) if is_chunked else self._plain(reader, size)
            if status.split()[1:2] != ["200"]:
                said = b"".join([part async for part in parts]).decode(errors="replace")
                raise TargetError(f"{self._base}{path}: {status.strip()}: {said[:_SHOWN]}")
            rest = b""
            async for part in parts:
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace")
            yield rest.decode(errors="replace")
        finally:
            writer.close()

    async def _plain(self, reader: asyncio.StreamReader, size: int | None) -> AsyncIterator[bytes]:
        """A body of so many bytes; None: until the connection ends."""
        left = size
        while left != 0 and (part := await self._within(reader.read(1 << 16))):
            left = None if left is None else max(0, left - len(part))
            yield part
        if left:
            raise self._closed()

    async def _chunks(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Of a chunked body (RFC 9112, 7.1)."""
        while size := await self._chunk_size(reader):
            yield await self._within(reader.readexactly(size))
            await self._line(reader)

    async def _chunk_size(self, reader: asyncio.StreamReader) -> int:
        line = await self._line(reader)
        try:
            return int(line.split(b";")[0], 16)
        except ValueError as error:
            raise TargetError(f"{self._host}:{self._port}: {line[:_SHOWN]!r} in place of a chunk's size") from error

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        line = await self._within(reader.readline())
        if not line.endswith(b"\n"):
            raise self._closed()
        return line

    async def _within(self, reading: Any) -> bytes:  # Any: a coroutine
        try:
            return bytes(await asyncio.wait_for(reading, self._timeout_s))
        except TimeoutError as error:
            raise TargetError(f"{self._host}:{self._port} said nothing for {self._timeout_s:.0f} s") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise self._closed() from error
        except ValueError as error:  # of `readline`
            raise TargetError(f"{self._host}:{self._port}: a line of over {_LINE_BYTES_MAX} bytes") from error

    def _closed(self) -> TargetError:
        return TargetError(f"{self._host}:{self._port} closed the connection within an answer")
