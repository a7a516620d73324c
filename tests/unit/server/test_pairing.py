"""How a phone gets to the page: addresses, QR code, instructions; and the token that is kept."""

from __future__ import annotations

import socket
import stat

import pytest

from moa_server.web.pairing import hosts_of, invitation, kept_token, link_with_token, page_urls, qr_code
from support.refusals import refused

URLS = ["https://192.168.1.20:8765/", "https://laptop.local:8765/"]
TOKEN = "abc-DEF_123"
PRINT = "AB:CD"
FROM = "that of MOA_TOKEN"


def told(urls=URLS, **changed) -> str:
    given = {"token": TOKEN, "token_from": FROM, "fingerprint": PRINT, "secure": True, "drawn": True}
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
    assert "\n".join(qr_code(link).splitlines()) in told() and TOKEN not in told()


def test_a_token_is_escaped_in_the_fragment():
    assert link_with_token("https://a/", "#&?/ü=%") == "https://a/#token=%23%26%3F%2F%C3%BC%3D%25"
    assert link_with_token("https://a/", "") == "https://a/"


def test_without_the_package_no_code_is_drawn(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert qr_code("x") is None and "moa-edge[web]" in told() and "\x1b" not in told()


def test_output_that_is_no_terminal_gets_neither_code_nor_token():
    text = told(drawn=False)
    assert TOKEN not in text and "\x1b" not in text and "█" not in text
    assert all(each in text for each in (*URLS, FROM))


def test_a_phone_is_told_what_to_trust():
    assert all(each in told() for each in ("https://192.168.1.20:8765/ca.crt", PRINT, "Android: ", "iOS: ", "--tls-ca"))
    own = told(fingerprint=None)
    assert "/ca.crt" not in own and "--tls-cert" not in own
    assert "--tls-cert auto" in told(["http://192.168.1.20:8765/"], fingerprint=None, secure=False)
    assert "--host" in told([])


@pytest.mark.parametrize("url", ["http://127.0.0.1:8765/", "http://localhost/", "http://[::1]:8765/"])
def test_on_this_machine_an_address_is_enough(url):
    (line,) = told([url], token="", token_from="", fingerprint=None, secure=False).splitlines()
    assert line.endswith(f" {url}")


def test_on_this_machine_programs_are_told_what_to_trust():
    text = told(["https://127.0.0.1:8765/"])
    assert all(each in text for each in ("https://127.0.0.1:8765/ca.crt", PRINT, "--tls-ca ca.crt --token"))
    assert "Android: " not in text


def test_addresses():
    urls = ["https://10.0.0.1:8765/", "https://[fd00::1]:8765/", "https://laptop.local:8765/"]
    assert page_urls("https", ["10.0.0.1", "fd00::1", "laptop.local"], 8765) == urls
    assert page_urls("https", ["a"], 443) == ["https://a/"] and page_urls("http", ["a"], 80) == ["http://a/"]
    assert page_urls("http", ["a"], 443) == ["http://a:443/"]


def test_hosts_of_one_address_and_of_all(monkeypatch):
    assert hosts_of("192.168.1.20") == ["192.168.1.20"] and hosts_of("localhost") == ["localhost"]
    monkeypatch.setattr(socket, "gethostname", lambda: "Laptop")
    found = [("10.0.0.5", 0), ("10.0.0.5", 0), ("127.0.1.1", 0), ("169.254.1.1", 0)]
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in found]
    found = [(address, 0, 0, 0) for address in ("fd00::5", "fe80::1%eth0")]
    answers += [(socket.AF_INET6, socket.SOCK_STREAM, 0, "", address) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    monkeypatch.setattr("moa_server.web.pairing._ELSEWHERE", ())
    assert hosts_of("0.0.0.0") == ["10.0.0.5", "laptop.local"]
    assert hosts_of("::") == ["10.0.0.5", "fd00::5", "laptop.local"]
    answers.clear()
    for name in ("localhost", "localhost.localdomain", "bad name", "läptop", "-x", ""):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert hosts_of("0.0.0.0") == []


def test_a_token_is_kept(tmp_path):
    file = tmp_path / "web" / "token"
    token = kept_token(file)
    assert len(token) == 32 and kept_token(file) == token and kept_token(tmp_path / "other") != token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_token_that_cannot_be_kept_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, code in (("file", "token_missing"), ("file/token", "not_writable"), ("bytes", "not_writable")):
        with refused(code) as error:
            kept_token(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
