"""Which URLs are fetched at all: the many ways to write a host, and the addresses that are nobody's business."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from airside.vision_workers.fetch.addresses import is_public
from airside.vision_workers.fetch.guard import URL_CHARS_MAX, AllowList, normalize_entry, parse_url
from airside.vision_workers.image_error import Cause, ImageError


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port", "path", "host_header"),
    [
        ("http://a.test", "http", "a.test", 80, "/", "a.test"),
        ("HTTPS://A.TEST/x", "https", "a.test", 443, "/x", "a.test"),
        ("http://a.test./x", "http", "a.test", 80, "/x", "a.test"),
        ("http://a.test:/x", "http", "a.test", 80, "/x", "a.test"),
        ("http://a.test:443/x", "http", "a.test", 443, "/x", "a.test:443"),
        ("https://a.test:8443?q=1#part", "https", "a.test", 8443, "/?q=1", "a.test:8443"),
        ("http://a.test/ü/%20/é?ö=%C3", "http", "a.test", 80, "/%C3%BC/%20/%C3%A9?%C3%B6=%C3", "a.test"),
        ("http://bücher.test/", "http", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://XN--BCHER-KVA.test/", "http", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://\uff41\u3002test/", "http", "a.test", 80, "/", "a.test"),  # full-width a, ideographic full stop
        ("http://127.0.0.1:8080/", "http", "127.0.0.1", 8080, "/", "127.0.0.1:8080"),
        ("http://\uff11\uff12\uff17.0.0.1/", "http", "127.0.0.1", 80, "/", "127.0.0.1"),
        ("http://[::1]:8080/", "http", "::1", 8080, "/", "[::1]:8080"),
        ("http://[0:0::0:1]/", "http", "::1", 80, "/", "[::1]"),
        ("http://a.test/a@b:c//d;e='f'?g=[h]|i", "http", "a.test", 80, "/a@b:c//d;e='f'?g=[h]|i", "a.test"),
    ],
)
def test_a_url_has_one_reading(url: str, scheme: str, host: str, port: int, path: str, host_header: str) -> None:
    target = parse_url(url)
    assert (target.scheme, target.host, target.port, target.path) == (scheme, host, port, path)
    assert target.host_header == host_header


REFUSED = [
    "",
    "a.test",
    "/etc/hostname",
    "//a.test/x",
    "file:///etc/hostname",
    "ftp://a.test/x.png",
    "gopher://a.test/",
    "data:image/png;base64,AAAA",
    "javascript:alert(1)",
    "http:a.test/x",
    "http:///x",
    "http://",
    "http://?q",
    "http://./x",
    "http://a..test/",
    "http://-a.test/",
    "http://.a.test/",
    "http://a_b$.test/",
    "http://" + "a" * 64 + ".test/",
    "http://" + "a." * 130 + "test/",
    # user names
    "http://user@a.test/",
    "http://user:secret@a.test/",
    "http://@a.test/",
    "http://a.test@evil.test/",
    "http://a.test%40evil.test/",
    "http://a.test:80@evil.test/",
    "http://a.test#@evil.test:x@/\\",
    # where readers disagree
    "http://a.test\\@evil.test/",
    "http:\\\\a.test\\x",
    "http://a.test\t.evil.test/",
    "http://a.test/\r\nHost: evil.test",
    "http://a.test/a b",
    " http://a.test/",
    "http://a.test/\x00",
    "http://a.test/\ud800",
    "http://\ud800.test/",
    "http://a%2Etest/",
    "http://%61.test/",
    "http://faß.test/",
    "http://a\u200db.test/",
    "http://a.test\uff0fx/",  # a full-width slash
    "http://[a.test]/",
    "http://[::1/",
    "http://::1/",
    "http://[::1%25eth0]/",
    "http://[fe80::1%eth0]/",
    # ports
    "http://a.test:0/",
    "http://a.test:22/",
    "http://a.test:25/",
    "http://a.test:1023/",
    "http://a.test:65536/",
    "http://a.test:-1/",
    "http://a.test:http/",
    "http://a.test:80:80/",
    # IPv4 addresses as nobody writes them
    "http://2130706433/",
    "http://0x7f000001/",
    "http://017700000001/",
    "http://127.1/",
    "http://127.0.1/",
    "http://0177.0.0.1/",
    "http://127.0.0.01/",
    "http://0x7f.0.0.1/",
    "http://0x7f.0x0.0x0.0x1/",
    "http://127.0.0.0x1/",
    "http://127.0.0.1.5/",
    "http://256.0.0.1/",
    "http://a.1/",
    "http://a.0x/",
    "http://127.0.0.1../",
    "http://①②⑦.0x1/",
]


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_with_two_readings_or_none_is_refused(url: str) -> None:
    with pytest.raises(ImageError) as refused:
        parse_url(url)
    assert refused.value.cause is Cause.NOT_ALLOWED
    for secret in ("a.test", "evil", "secret", "127", "hostname"):
        assert secret not in refused.value.detail


def test_a_long_url_is_refused() -> None:
    path = "/" + "x" * (URL_CHARS_MAX - len("http://a.test/"))
    assert parse_url("http://a.test" + path).path == path
    with pytest.raises(ImageError, match=str(URL_CHARS_MAX)):
        parse_url("http://a.test" + path + "x")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("1.1.1.1", True),
        ("172.15.255.255", True),
        ("172.32.0.0", True),
        ("100.63.255.255", True),
        ("223.255.255.255", True),
        ("0.0.0.0", False),
        ("0.1.2.3", False),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("100.100.100.200", False),
        ("127.0.0.1", False),
        ("127.255.255.254", False),
        ("168.63.129.16", False),
        ("169.254.169.254", False),
        ("172.16.0.1", False),
        ("172.31.255.255", False),
        ("192.0.0.192", False),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("192.168.1.1", False),
        ("198.18.0.1", False),
        ("198.51.100.1", False),
        ("203.0.113.1", False),
        ("224.0.0.1", False),
        ("239.255.255.255", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("2606:4700::1111", True),
        ("2a00:1450:4001::1", True),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", False),
        ("64:ff9b::8.8.8.8", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::1", False),
        ("100::1", False),
        ("2001::1", False),  # Teredo
        ("2001:db8::1", False),
        ("2002:7f00:1::1", False),
        ("2002:808:808::1", False),
        ("3fff::1", False),
        ("5f00::1", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("fe80::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(ip_address(address)) is expected


@pytest.mark.parametrize(
    ("entry", "host", "expected"),
    [
        ("a.test", "a.test", True),
        ("A.Test.", "a.test", True),
        ("bücher.test", "xn--bcher-kva.test", True),
        ("a.test", "b.a.test", False),
        ("a.test", "xa.test", False),
        ("*.a.test", "b.a.test", True),
        ("*.a.test", "c.b.a.test", True),
        ("*.a.test", "a.test", False),
        ("*.a.test", "xa.test", False),
        ("*.a.test", "a.test.evil", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("[::1]", "::1", True),
        ("0:0::1", "::1", True),
        ("127.0.0.1", "localhost", False),
        ("localhost", "127.0.0.1", False),
    ],
)
def test_a_host_must_be_on_the_list(entry: str, host: str, expected: bool) -> None:
    allowed = AllowList([entry])
    if expected:
        assert allowed.entry_for(host) == normalize_entry(entry)
        return
    with pytest.raises(ImageError) as refused:
        allowed.entry_for(host)
    assert refused.value.cause is Cause.NOT_ALLOWED
    assert host not in refused.value.detail


def test_an_empty_list_allows_nothing() -> None:
    with pytest.raises(ImageError):
        AllowList([]).entry_for("a.test")


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "a.*", "*a.test", "**.a.test", "http://a.test", "a.test/x", "a.test:80", "*.127.0.0.1",
              "2130706433", "10.0.0.0/8", "a b"],
)  # fmt: skip
def test_an_entry_that_can_match_nothing_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        AllowList([entry])


@pytest.mark.parametrize(
    ("entries", "resolved", "permitted"),
    [
        (["a.test"], ["8.8.8.8"], ["8.8.8.8"]),
        (["a.test"], ["8.8.8.8", "8.8.8.8", "2606:4700::1"], ["8.8.8.8", "2606:4700::1"]),
        (["a.test"], ["10.0.0.7"], []),
        (["a.test"], ["10.0.0.7", "8.8.8.8", "::1"], ["8.8.8.8"]),
        (["a.test"], [], []),
        (["a.test", "10.0.0.7"], ["10.0.0.7"], ["10.0.0.7"]),
        (["a.test", "10.0.0.7"], ["10.0.0.8"], []),
        (["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"]),
        (["127.0.0.1"], ["::ffff:127.0.0.1"], []),
        (["127.0.0.1"], ["::1"], []),
        (["localhost"], ["::1", "127.0.0.1"], ["::1", "127.0.0.1"]),
        (["localhost"], ["127.0.0.2"], []),
        (["localhost.a.test"], ["127.0.0.1"], []),
    ],
)
def test_what_a_name_resolves_to_must_be_public_or_listed(
    entries: list[str], resolved: list[str], permitted: list[str]
) -> None:
    allowed, addresses = AllowList(entries), [ip_address(text) for text in resolved]
    if permitted:
        assert [str(address) for address in allowed.permitted(addresses)] == permitted
        return
    with pytest.raises(ImageError) as refused:
        allowed.permitted(addresses)
    assert refused.value.cause is Cause.NOT_ALLOWED
    assert not any(text in refused.value.detail for text in resolved)
