"""What leads a phone to the page: addresses, QR code, words; and the token that is kept."""

from __future__ import annotations

import socket
import stat

import pytest

from moa_runtime.errors import MoaError
from moa_server.web.pairing import hosts_of, invitation, kept_token, link_with_token, page_urls, qr_code

URLS = ["https://192.168.1.20:8765/", "https://laptop.local:8765/"]
TOKEN = "abc-DEF_123"
PRINT = "AB:CD"


def told(urls=URLS, **changed) -> str:
    given = {"token": TOKEN, "token_from": "that of MOA_TOKEN", "fingerprint": PRINT, "secure": True, "drawn": True}
    return invitation(urls, **{**given, **changed})


def modules(drawn: str) -> list[list[int]]:
    """The QR code that a terminal shows: 1 where it is dark."""
    rows: list[list[int]] = []
    for line in drawn.split("\n"):
        assert line.startswith("\x1b[30;107m") and line.endswith("\x1b[0m")  # black on white
        shown = line.removeprefix("\x1b[30;107m").removesuffix("\x1b[0m")
        rows += [[int(each in "▀█") for each in shown], [int(each in "▄█") for each in shown]]
    return rows


def test_the_code_is_the_address_with_the_token():
    segno = pytest.importorskip("segno")
    link = link_with_token(URLS[0], TOKEN)
    assert link == "https://192.168.1.20:8765/#token=abc-DEF_123"
    rows = modules(qr_code(link))
    expected = [list(row) for row in segno.make(link, error="l", micro=False, boost_error=False).matrix]
    size = len(expected)
    assert [row[2 : 2 + size] for row in rows[2 : 2 + size]] == expected
    around = [*rows[:2], *rows[2 + size :], *([*row[:2], *row[2 + size :]] for row in rows)]
    assert len(rows[0]) == size + 4 and len(rows) >= size + 4 and not any(map(any, around))
    assert "\n".join(qr_code(link).splitlines()) in told()


def test_a_token_is_no_part_of_another_address():
    assert link_with_token("https://a/", "#&?/ü=%") == "https://a/#token=%23%26%3F%2F%C3%BC%3D%25"
    assert link_with_token("https://a/", "") == "https://a/"


def test_without_the_package_it_says_which_one(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert qr_code("x") is None
    assert 'pip install "moa-edge[web]" draws a QR code' in told() and "with a picture" not in told()


def test_what_is_no_terminal_gets_neither_code_nor_token():
    text = told(drawn=False)
    assert TOKEN not in text and "\x1b" not in text and "█" not in text
    assert all(url in text for url in URLS) and "It asks for a token: that of MOA_TOKEN." in text


def test_the_words_of_a_terminal_have_no_token_either():
    assert TOKEN not in told()


def test_what_the_phone_has_to_trust():
    assert (
        "https://192.168.1.20:8765/ca.crt" in told() and PRINT in told() and "Android: " in told() and "iOS: " in told()
    )
    own = told(fingerprint=None)
    assert "authority" not in own and "Without TLS" not in own
    assert "--tls-cert auto makes it whole" in told(["http://192.168.1.20:8765/"], fingerprint=None, secure=False)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8765/", "http://localhost/", "http://[::1]:8765/", "http://127.0.0.1/"]
)
def test_on_this_machine_an_address_is_enough(url):
    assert told([url], token="", token_from="", fingerprint=None, secure=False) == f"moa-serve: the page: {url}"


def test_without_an_address():
    assert "name one with --host" in told([])


def test_addresses():
    assert page_urls("https", ["10.0.0.1", "fd00::1", "laptop.local"], 8765) == [
        "https://10.0.0.1:8765/",
        "https://[fd00::1]:8765/",
        "https://laptop.local:8765/",
    ]
    assert page_urls("https", ["a"], 443) == ["https://a/"] and page_urls("http", ["a"], 80) == ["http://a/"]
    assert page_urls("http", ["a"], 443) == ["http://a:443/"]


def test_hosts_of_one_address_and_of_all(monkeypatch):
    assert hosts_of("192.168.1.20") == ["192.168.1.20"] and hosts_of("localhost") == ["localhost"]
    monkeypatch.setattr(socket, "gethostname", lambda: "Laptop")
    found = [("10.0.0.5", 0), ("10.0.0.5", 0), ("127.0.1.1", 0), ("169.254.1.1", 0)]
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in found]
    answers += [
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", (address, 0, 0, 0)) for address in ("fd00::5", "fe80::1%eth0")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    monkeypatch.setattr("moa_server.web.pairing._ELSEWHERE", ())
    assert hosts_of("0.0.0.0") == ["10.0.0.5", "laptop.local"]
    assert hosts_of("::") == ["10.0.0.5", "fd00::5", "laptop.local"]


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", "bad name", "läptop", "-x", ""])
def test_names_that_say_nothing(monkeypatch, name):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    monkeypatch.setattr("moa_server.web.pairing._ELSEWHERE", ())
    assert hosts_of("0.0.0.0") == []


def test_a_token_is_kept(tmp_path):
    file = tmp_path / "web" / "token"
    token = kept_token(file)
    assert len(token) == 32 and kept_token(file) == token and kept_token(tmp_path / "other") != token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_token_that_cannot_be_kept(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoaError, match=r"the file .* has no token"):
        kept_token(tmp_path / "file")
    with pytest.raises(MoaError, match="no token can be kept in"):
        kept_token(tmp_path / "file" / "token")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(MoaError, match="no token can be kept in"):
        kept_token(tmp_path / "bytes")
