"""A server that answers `/v1/models` and `/v1/completions` as a script says, over plain sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 30.0


@dataclass(slots=True)
class Script:
    """How it answers, and what it was asked."""

    chunked: bool = True
    split: bool = False
    """Lines are torn apart: a chunk ends within a character."""
    usage: bool = True
    error: str | None = None
    pause_s: float = 0.002
    stops_after: int | None = None
    """So many tokens, however many were asked for."""
    health: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    waits_for: int = 1
    """Nobody is answered until so many have been within at once, or for so long that the test has failed."""
    closes_after: int | None = None
    """So many bytes of an answer's body, and no more."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def counted(self, asked: dict[str, Any]) -> Iterator[None]:
        """Notes a request, and how many there are within. The client must not know of its end before that is noted."""
        with self.changed:
            self.asked.append(asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most_at_once >= self.waits_for, WAIT_S)
        try:
            yield
        finally:
            with self.changed:
                self.at_once -= 1


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    script: Script
    _written = 0

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "scripted"}]}).encode()
        self._send(self.script.health if self.path == "/health" else 200, body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.script.counted(asked):
            if self.script.error is None:
                self._stream(asked)
        if self.script.error is not None:
            self._send(400, json.dumps({"error": {"message": self.script.error}}).encode())
        elif self.script.closes_after is None:
            self._end()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        return

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header(*(("Transfer-Encoding", "chunked") if self.script.chunked else ("Connection", "close")))
        self.end_headers()
        num_tokens = min(asked["max_tokens"], self.script.stops_after or asked["max_tokens"])
        for _ in range(num_tokens):
            time.sleep(self.script.pause_s)
            self._event({"choices": [{"text": "ä", "finish_reason": None}]})
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        if self.script.usage:
            counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": num_tokens}
            self._event({"choices": [], "usage": counts})
        self._write(b"data: [DONE]\n\n")

    def _end(self) -> None:
        """What tells the client that this was all; without chunks, the end of the connection does."""
        if self.script.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        whole = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        at = whole.find("ä".encode()) + 1 if self.script.split else 0
        for part in (whole[:at], whole[at:]):
            if part:
                self._write(part)

    def _write(self, part: bytes) -> None:
        left = len(part) if self.script.closes_after is None else self.script.closes_after - self._written
        self._written += len(part)
        if left > 0:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part[:left]), part[:left]) if self.script.chunked else part[:left])


@contextmanager
def scripted_openai(script: Script) -> Iterator[str]:
    """Yields the URL of its API."""
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
