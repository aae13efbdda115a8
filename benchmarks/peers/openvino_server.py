"""OpenVINO GenAI's continuous-batching pipeline behind OpenAI's API, as far as a benchmark needs it.

It has no server of its own on PyPI. Prompts are token ids, outputs stream without their texts, which costs less than a
real server would: `openvino_server.py MODEL THREADS PORT`.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from run_openvino import make_config, make_pipeline

Parts = queue.SimpleQueue[int | None]
"""How many tokens came together; None: that was all."""


class Engine(threading.Thread):
    """Steps the pipeline while there are requests."""

    def __init__(self, pipeline: Any) -> None:  # Any: a ContinuousBatchingPipeline
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._asked: queue.SimpleQueue[tuple[list[int], int, Parts]] = queue.SimpleQueue()
        self._live: list[tuple[Any, Parts]] = []
        self._next_id = 0

    def ask(self, prompt: list[int], num_tokens: int) -> Parts:
        """Where its tokens will come."""
        parts: Parts = queue.SimpleQueue()
        self._asked.put((prompt, num_tokens, parts))
        return parts

    def run(self) -> None:
        while True:
            while not self._live or not self._asked.empty():
                self._add(*self._asked.get())
            self._pipeline.step()
            self._live = [each for each in self._live if self._passes_on(*each)]

    def _add(self, prompt: list[int], num_tokens: int, parts: Parts) -> None:
        import numpy as np
        import openvino

        inputs = openvino.Tensor(np.array([prompt], np.int64))
        self._live.append((self._pipeline.add_request(self._next_id, inputs, make_config(num_tokens)), parts))
        self._next_id += 1

    def _passes_on(self, handle: Any, parts: Parts) -> bool:  # Any: a GenerationHandle
        """Whether there is more to come."""
        import openvino_genai as genai

        ended = handle.get_status() != genai.GenerationStatus.RUNNING
        while handle.can_read():
            for output in handle.read().values():
                parts.put(len(output.generated_ids))
        if ended:
            parts.put(None)
        return not ended


class Handler(BaseHTTPRequestHandler):
    """`GET /v1/models` and `POST /v1/completions`, streamed."""

    engine: Engine

    def do_GET(self) -> None:
        self._begin()
        self.wfile.write(json.dumps({"data": [{"id": "openvino"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = self.engine.ask(asked["prompt"], asked["max_tokens"])
        self._begin()
        total = 0
        while (count := parts.get()) is not None:
            total += count
            self._event({"choices": [{"text": "", "finish_reason": None}]})
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": total}
        self._event({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        return

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:  # Any: what JSON has
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


def main() -> None:
    """Serves until it is ended."""
    model, threads, port = sys.argv[1:]
    Handler.engine = Engine(make_pipeline(model, int(threads)))
    Handler.engine.start()
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
