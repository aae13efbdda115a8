"""Keys of the bus between nodes: CURVE (curvezmq.org), as Z85 text of 40 characters.

Made anew for each run. The controller lets in whoever has the client's pair; others get no word through, and can read
none. Whoever is given `ClientKeys` is trusted as any process of the run is.

Ray brings them to the other nodes: they are as secret as what Ray's own connections carry, which only RAY_USE_TLS
encrypts. An outsider can still take up the controller's connections and memory, each for half a minute; the port is for
the cluster's own network, as Ray's are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """For the controller."""

    secret: str = field(repr=False)
    client: str  # public: of those who are let in


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """For all that connect over TCP."""

    server: str  # public: of the one controller that is talked to
    secret: str = field(repr=False)

    @property
    def public(self) -> str:
        """What goes with the secret."""
        return zmq.curve_public(self.secret.encode()).decode()


def make_keys() -> tuple[ServerKeys, ClientKeys]:
    """The two halves of a new run's keys."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    return ServerKeys(server_secret, client_public), ClientKeys(server_public, client_secret)
