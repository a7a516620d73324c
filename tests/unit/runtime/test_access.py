"""Hosts that a server on loopback answers, and origins; tokens are tested with the servers."""

from __future__ import annotations

import pytest

from moa_runtime.sockets import check_hosts, check_origins, host_allowed, names_address, origin_allowed, own_origin
from support.refusals import refused

LOCAL = [
    "localhost",
    "localhost:8765",
    "LocalHost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.0.0.1.:80",
    "[::1]",
    "[::1]:9",
    None,
]
FOREIGN = [
    "evil.example",
    "evil.example:8765",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.example:127.0.0.1",
    "localhost@evil.example",
    "localhost:80@evil.example",
    "[::2]",
    "::1",
    "[localhost.evil]",
    "10.0.0.1",
    "0.0.0.0",
    "localhost/",
    "local host",
    "",
    ":80",
]


@pytest.mark.parametrize("host", [*LOCAL, *FOREIGN])
def test_a_server_on_loopback_answers_its_own_names_alone(host):
    assert host_allowed(host, True) == (host in LOCAL)
    assert host_allowed(host, True, ["*"]) and host_allowed(host, False)


def test_further_names_are_answered_if_they_are_given():
    assert host_allowed("Moa.Home.:80", True, ["other", "moa.home"])
    assert not host_allowed("moa.home.example", True, ["moa.home"])
    for name, header in (
        ("Moa.Home.", "moa.home:80"),
        ("fd00::1", "[fd00::1]:80"),
        ("10.0.0.1", "10.0.0.1"),
        ("*", "x"),
    ):
        check_hosts([name])
        assert host_allowed(header, True, [name])


@pytest.mark.parametrize("host", ["https://moa.home", "moa.home:8443", "moa.home/path", "[fd00::1]", "a b", ""])
def test_a_further_name_that_no_host_has_is_refused(host):
    with refused("bad_host"):
        check_hosts(["moa.home", host])


ORIGINS = [
    "https://app.example",
    "http://localhost",
    "http://127.0.0.1:3000",
    "http://[::1]:3000",
    "https://app.example:8443",
    "https://app.example:80",
    "capacitor://localhost",
    "ionic://localhost",
    "chrome-extension://abcdefgh",
    "file://",
    "null",
    "*",
]
NONE = [
    "https://app.example/",
    "https://app.example/chat",
    "https://App.example",
    "HTTPS://app.example",
    "https://app.example:443",
    "http://app.example:80",
    "https://user@app.example",
    "https://app.example?x",
    "https://*.app.example",
    "app.example",
    "localhost:3000",
    "//app.example",
    "file:///",
    "Null",
    "https://a b",
    "https://",
    "",
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_an_origin_is_allowed_if_it_is_named(origin):
    check_origins(ORIGINS)
    others = [other for other in ORIGINS if other not in (origin, "*")]
    assert origin_allowed(origin, [origin]) and not origin_allowed(origin, others)
    assert origin_allowed(origin, ["*"]) and origin_allowed(None, [])


@pytest.mark.parametrize("origin", NONE)
def test_an_option_that_is_no_origin_is_refused(origin):
    with refused("bad_origin"):
        check_origins(["https://app.example", origin])


@pytest.mark.parametrize(
    ("origin", "host", "secure", "own"),
    [
        ("https://moa.example", "moa.example", True, True),
        ("https://moa.example:8765", "MOA.example:8765", True, True),
        ("https://[fd00::1]:8765", "[fd00::1]:8765", True, True),
        ("http://moa.example:8765", "moa.example:8765", True, False),
        ("http://moa.example:8765", "moa.example:8765", False, True),
        ("https://moa.example", "moa.example", False, True),  # behind a proxy
        ("https://moa.example:8765", "moa.example", True, False),
        ("https://moa.example", "moa.example:8765", True, False),
        ("https://moa.example.evil", "moa.example", True, False),
        ("https://evil", "moa.example", True, False),
        ("null", "null", False, False),
        ("file://", "", False, False),
        ("https://moa.example", None, True, False),
    ],
)
def test_whose_page_it_is(origin, host, secure, own):
    assert own_origin(origin, host, secure) == own


@pytest.mark.parametrize(
    ("host", "address"),
    [
        *((host, True) for host in ("127.0.0.1", "192.168.1.20:8765", "[::1]", "[fd00::1]:443", "0.0.0.0")),
        *((host, False) for host in ("localhost", "1.2.3", "1.2.3.4.example", "127.0.0.1.evil:80", "::1", "[evil]")),
        *((host, False) for host in ("", "1.2.3.4@evil")),
    ],
)
def test_an_address_is_told_from_a_name(host, address):
    assert names_address(host) == address
