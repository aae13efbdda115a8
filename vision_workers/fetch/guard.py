"""Where a picture may be fetched from: the URL's parts, and the operator's allow-list.

A URL is taken apart here once, strictly: where two readers could disagree about the host, it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, quote, urlsplit

from airside.vision_workers.fetch.addresses import Address, is_public
from airside.vision_workers.image_error import Cause, ImageError

URL_CHARS_MAX = 8192

_PORTS = {"http": 80, "https": 443}
_PRIVILEGED_PORTS = 1024
_LOCALHOST = "localhost"
_LOOPBACK = (IPv4Address("127.0.0.1"), IPv6Address("::1"))

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ODD_CHARACTERS = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")  # the last: halves of a pair, no text
_AMBIGUOUS_IN_IDNA = re.compile("[ßẞς\u200c\u200d]")  # IDNA 2003 and 2008 make different hosts of these
_KEPT_IN_PATHS = "!$&'()*+,;=:@/?%-._~[]|"


@dataclass(frozen=True, slots=True)
class Target:
    """Where one request goes. `host` is in lower case, punycode or an address's usual spelling, without a last dot."""

    scheme: str
    host: str
    port: int
    path: str  # with the query, percent-encoded
    address: Address | None  # when the host is one

    @property
    def host_header(self) -> str:
        """The host as HTTP's `Host` names it."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """The parts of an absolute http or https URL. A fragment is dropped.

    Raises:
        ImageError: `not_allowed`; the detail says what is wrong without naming the host.
    """
    if len(url) > URL_CHARS_MAX:
        raise _refused(f"its URL has {len(url)} characters; at most {URL_CHARS_MAX} are allowed")
    if _ODD_CHARACTERS.search(url):
        raise _refused("its URL has spaces, backslashes or control characters; percent-encode them")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused("its URL cannot be read") from error
    if parts.scheme not in _PORTS:
        raise _refused("only http and https URLs are fetched")
    if "@" in parts.netloc:
        raise _refused("its URL carries a user name; a URL with credentials is not fetched")
    host = normalize_host(parts.hostname or "")
    if host is None:
        raise _refused("its URL has no valid host")
    port = _PORTS[parts.scheme] if port is None else port
    if port < _PRIVILEGED_PORTS and port not in _PORTS.values():
        raise _refused(f"its URL names port {port}; 80, 443 and those from {_PRIVILEGED_PORTS} on are allowed")
    return Target(parts.scheme, host, port, _path(parts), _address(host))


def normalize_host(host: str) -> str | None:
    """One spelling for each host: lower case, punycode, no last dot; addresses as `ipaddress` writes them.

    None for what is no host's name, and for an IPv4 address in an unusual spelling (one number, octal, hexadecimal,
    fewer than four parts), which resolvers would take.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    address = _address(bare)
    if address is not None:
        return None if getattr(address, "scope_id", None) else str(address)
    if _AMBIGUOUS_IN_IDNA.search(host):
        return None
    try:
        name = host.encode("idna").decode("ascii").lower()
    except UnicodeError:
        return None
    name = name.removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    # WHATWG URL, "ends in a number": such a host is an IPv4 address or nothing.
    if _NUMBER.fullmatch(labels[-1]):
        return name if _address(name) is not None else None
    return name


class AllowList:
    """The hosts that the operator allows.

    An entry is a host's name, `*.` and a domain for all hosts below it, or an address. A host must be on the list by
    name. What its name resolves to must be public, or be on the list itself, as an address; `localhost` stands for
    127.0.0.1 and ::1. So names that point into the private network open nothing by themselves:

        allowed_domains            http://pictures.lan/, which is 10.0.0.7
        [pictures.lan]             refused
        [10.0.0.7]                 refused; http://10.0.0.7/ is fetched
        [pictures.lan, 10.0.0.7]   fetched

    Raises:
        ValueError: an entry that can match nothing, with the entry and the remedy.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [normalize_entry(entry) for entry in entries]
        self._addresses = {address for entry in self._entries if (address := _address(entry)) is not None}
        if _LOCALHOST in self._entries:
            self._addresses.update(_LOOPBACK)

    def entry_for(self, host: str) -> str:
        """The entry that a host (as `Target` has it) is on the list by. Raises ImageError when there is none."""
        for entry in self._entries:
            if entry == host or (entry.startswith("*.") and host.endswith(entry[1:])):
                return entry
        raise _refused("its host is not on the server's list (vision.media.allowed_domains)")

    def permitted(self, addresses: Iterable[Address]) -> list[Address]:
        """Those that may be connected to, each once. Raises ImageError when there are none."""
        permitted = [a for a in dict.fromkeys(addresses) if a in self._addresses or is_public(a)]
        if not permitted:
            raise _refused("its host has no address on the public internet")
        return permitted


def normalize_entry(entry: str) -> str:
    """An entry of the allow-list in one spelling. Raises ValueError, with the remedy."""
    prefix, domain = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
    host = normalize_host(domain)
    if host is None or (prefix and _address(host) is not None):
        raise ValueError(
            f"{entry!r} is no host; write a name without scheme, port and path (pictures.example.org), "
            "*.example.org for all hosts below it, or an address"
        )
    return prefix + host


def _address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _path(parts: SplitResult) -> str:
    path = quote(parts.path or "/", safe=_KEPT_IN_PATHS)
    return path + ("?" + quote(parts.query, safe=_KEPT_IN_PATHS) if parts.query else "")


def _refused(detail: str) -> ImageError:
    return ImageError(Cause.NOT_ALLOWED, detail)
