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


@dataclass(slots=True)
class Script:
    """How it answers, and what it was asked."""

    chunked: bool = True
    split: bool = False
    """Lines are torn apart: a chunk ends within a character."""
    usage: bool = True
    error: str | None = None
    pause_s: float = 0.002
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counted(self, asked: dict[str, Any]) -> Iterator[None]:
        """Notes a request, and how many there are within."""
        with self.lock:
            self.asked.append(asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        yield
        with self.lock:
            self.at_once -= 1


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    script: Script

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "scripted"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.script.counted(asked):
            if self.script.error is not None:
                self._send(400, json.dumps({"error": {"message": self.script.error}}).encode())
            else:
                self._stream(asked)

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
        for _ in range(asked["max_tokens"]):
            time.sleep(self.script.pause_s)
            self._event({"choices": [{"text": "ä", "finish_reason": None}]})
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        if self.script.usage:
            counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
            self._event({"choices": [], "usage": counts})
        self._write(b"data: [DONE]\n\n")
        if self.script.chunked:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        whole = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        at = whole.find("ä".encode()) + 1 if self.script.split else 0
        for part in (whole[:at], whole[at:]):
            if part:
                self._write(part)

    def _write(self, part: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if self.script.chunked else part)


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
