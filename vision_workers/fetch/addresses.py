"""Which IP addresses belong to the public internet, and how a resolver's answers become addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

Resolver = Callable[[str], list[Address]]
"""The addresses of a host's name, best first. Raises OSError when it has none."""

# Spelled out rather than asked of `ipaddress`, whose answers differ between versions of Python.
_NOT_PUBLIC_V4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared, behind a carrier's NAT; also metadata of some clouds
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a public address that inside Azure's machines is their host
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
]
"""The IANA IPv4 Special-Purpose Address Registry, and one more."""

_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""All that is given out. Outside are loopback, link-local, unique local, multicast, and IPv4 in disguise: mapped
(::ffff:0:0/96), compatible (::/96) and NAT64 (64:ff9b::/96, 64:ff9b:1::/48)."""

_NOT_PUBLIC_V6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address in disguise
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
]
"""The IANA IPv6 Special-Purpose Address Registry, as far as it is inside of `_GLOBAL_UNICAST`."""


def is_public(address: Address) -> bool:
    """Whether an address can be that of a host on the public internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)


def resolve(host: str) -> list[Address]:
    """What the system's resolver says, in its order. It may take its time, and nothing can interrupt it.

    Raises:
        OSError: it knows no such host.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [ip_address(str(answer[4][0])) for answer in answers]
