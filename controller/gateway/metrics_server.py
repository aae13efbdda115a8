"""Serves metrics over HTTP, in threads beside the event loop."""

from __future__ import annotations

import logging
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from airside.controller.gateway.errors import AddressBusy

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""A connection that says nothing for so long is closed, and its thread ends."""

_STOP_S = 0.1  # how often the server looks whether it is to stop


class MetricsServer:
    """Listens from the start on; answers any path with all metrics in the text format of Prometheus.

    Args:
        host, port: where to listen.
        registry: what is collected for each answer, in a thread.

    Raises:
        AddressBusy: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        bare = host.strip("[]")
        kind = _Ipv6Server if ":" in bare else _Server
        try:
            self._server = kind((bare, port), _Handler)
        except OSError as error:
            raise AddressBusy(
                f"server.metrics.port: cannot listen on {host}:{port}: {error.strerror or error}; "
                "choose another port, or 0 for no metrics"
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_STOP_S,), daemon=True)
        self._thread.start()
        log.info("metrics address=http://%s:%d/metrics", host, port)

    def close(self) -> None:
        """Stops listening. Takes a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """As its base does, but for the look-up of the host's name, which may take long and is used for nothing."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, *_: Any) -> None:
        """A scraper that hangs up is no news; what else goes wrong is logged rather than printed."""
        log.debug("a metrics request failed", exc_info=True)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """No line per scrape."""
