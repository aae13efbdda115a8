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
    """Lines are torn apart: a chunk ends anywhere."""
    usage: bool = True
    error: str | None = None
    pause_s: float = 0.002
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0


@contextmanager
def scripted_openai(script: Script) -> Iterator[str]:
    """Yields the URL of its API."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "scripted"}]}).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                script.asked.append(asked)
                script.at_once += 1
                script.most_at_once = max(script.most_at_once, script.at_once)
            if script.error is not None:
                self._send(400, json.dumps({"error": {"message": script.error}}).encode())
            else:
                self._stream(asked)
            with lock:
                script.at_once -= 1

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, asked: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding" if script.chunked else "Connection", self._ending())
            self.end_headers()
            for _ in range(asked["max_tokens"]):
                time.sleep(script.pause_s)
                self._event({"choices": [{"text": "ä", "finish_reason": None}]})
            self._event({"choices": [{"text": "", "finish_reason": "length"}]})
            if script.usage:
                counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
                self._event({"choices": [], "usage": counts})
            self._write(b"data: [DONE]\n\n")
            if script.chunked:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def _ending(self) -> str:
            return "chunked" if script.chunked else "close"

        def _event(self, event: dict[str, Any]) -> None:
            whole = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            at = whole.find("ä".encode()) + 1 if script.split else 0  # within a character
            for part in (whole[:at], whole[at:]):
                if part:
                    self._write(part)

        def _write(self, part: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if script.chunked else part)

        def log_message(self, *_: object) -> None:
            return

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
