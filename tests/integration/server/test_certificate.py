"""The certificate of ``--tls-cert auto``: what trusts its authority trusts it, for these hosts and no others."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

pytest.importorskip("cryptography")

from cryptography import x509

from integration.server.test_pages import TOKEN, bearer, hello
from moa_runtime.errors import MoaError
from moa_server.settings import Settings
from moa_server.web import certificate as module
from moa_server.web.certificate import own_certificate
from support.server.edge_running import eventually
from support.server.running import TIMEOUT_S, serving
from support.server.web_site import site
from support.toy_engine import ToyEngine

NOW = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)
HOSTS = ["192.168.1.20", "fd12::20", "laptop.local"]


def trusting(authority: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.decode())


def handshake(file: Path, authority: bytes, host: str) -> None:
    """Raises SSLError where a client that trusts the authority would not talk to this host."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(file, file)
    ours, theirs = socket.socketpair()
    failed: list[OSError] = []

    def answer() -> None:
        try:
            served.wrap_socket(ours, server_side=True).close()
        except OSError as error:
            failed.append(error)
            ours.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        trusting(authority).wrap_socket(theirs, server_hostname=host).close()
    finally:
        theirs.close()
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1", "::1"])
def test_who_trusts_the_authority_trusts_it(tmp_path, host):
    made = own_certificate(tmp_path / "web", HOSTS)
    handshake(made.file, made.authority, host)


def test_it_is_for_these_hosts_alone(tmp_path):
    made = own_certificate(tmp_path, HOSTS)
    for host in ("192.168.1.21", "other.local", "example.com"):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for|doesn't match"):
            handshake(made.file, made.authority, host)
    other = own_certificate(tmp_path / "other", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.file, other.authority, HOSTS[0])


@pytest.mark.parametrize("host", ["example.com", "8.8.8.8"])
def test_a_stolen_authority_speaks_for_no_site_of_the_internet(tmp_path, host):
    made = own_certificate(tmp_path, HOSTS)
    stolen = module._read(tmp_path / "authority.pem")
    forged = module._new_server(stolen, [host], datetime.now(timezone.utc))
    (tmp_path / "forged.pem").write_bytes(forged.pem())
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        handshake(tmp_path / "forged.pem", made.authority, host)


def test_only_the_user_can_read_the_keys(tmp_path):
    made = own_certificate(tmp_path / "a" / "web", HOSTS)
    folder = made.file.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "authority.pem": 0o600,
        "server.pem": 0o600,
    }
    assert b"PRIVATE" not in made.authority


def test_it_is_kept(tmp_path):
    first = own_certificate(tmp_path, HOSTS, NOW)
    kept = first.file.read_bytes()
    assert own_certificate(tmp_path, HOSTS[1:], NOW + timedelta(days=300)) == first
    assert first.file.read_bytes() == kept


def test_it_is_renewed_before_it_ends_and_phones_go_on_trusting(tmp_path):
    first = own_certificate(tmp_path, HOSTS, NOW)
    assert first.ends == NOW + timedelta(days=397)
    later = own_certificate(tmp_path, HOSTS, NOW + timedelta(days=340))
    assert later.ends == NOW + timedelta(days=340 + 397)
    assert (later.authority, later.fingerprint) == (first.authority, first.fingerprint)
    # iOS takes no certificate of more than 825 days.
    served = x509.load_pem_x509_certificate(later.file.read_bytes())
    assert served.not_valid_after_utc - served.not_valid_before_utc < timedelta(days=825)


def test_another_address_needs_no_other_authority(tmp_path):
    first = own_certificate(tmp_path, HOSTS)
    moved = own_certificate(tmp_path, ["10.1.2.3", "other.local"])
    assert moved.authority == first.authority
    handshake(moved.file, first.authority, "10.1.2.3")


def test_a_host_of_the_internet_needs_an_authority_that_may_speak_for_it(tmp_path):
    first = own_certificate(tmp_path, HOSTS)
    public = own_certificate(tmp_path, ["203.0.113.7", "moa.example.com"])
    assert public.fingerprint != first.fingerprint
    for host in ("203.0.113.7", "moa.example.com"):
        handshake(public.file, public.authority, host)


def test_an_authority_that_ends_is_made_anew(tmp_path):
    first = own_certificate(tmp_path, HOSTS, NOW)
    late = own_certificate(tmp_path, HOSTS, NOW + timedelta(days=3650 - 300))
    assert late.fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["authority.pem", "server.pem"])
@pytest.mark.parametrize("content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_broken_file_is_made_anew(tmp_path, name, content):
    own_certificate(tmp_path, HOSTS)
    (tmp_path / name).write_bytes(content)
    made = own_certificate(tmp_path, HOSTS)
    handshake(made.file, made.authority, HOSTS[0])


def test_a_certificate_that_is_not_ours_is_made_anew(tmp_path):
    own_certificate(tmp_path, HOSTS)
    own_certificate(tmp_path / "other", HOSTS)
    (tmp_path / "other" / "server.pem").replace(tmp_path / "authority.pem")
    made = own_certificate(tmp_path, HOSTS)
    handshake(made.file, made.authority, HOSTS[0])


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoaError, match=r"no certificate can be kept in .*file/web: "):
        own_certificate(tmp_path / "file" / "web", HOSTS)
    with pytest.raises(MoaError, match="write it in ASCII"):
        own_certificate(tmp_path, ["lärm.local"])


def test_the_page_over_tls_on_an_address_that_others_reach(tmp_path, outer_address):
    made = own_certificate(tmp_path / "web", [outer_address])
    options = {"files": site(tmp_path), "tls": (made.file, made.file), "host": outer_address}
    with serving(ToyEngine(), Settings(token=TOKEN, loopback=False), **options) as verifier:
        address, context = f"{outer_address}:{verifier.port}", trusting(made.authority)
        page = httpx.get(f"https://{address}/", verify=context)
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        graph = httpx.get(f"https://{address}/bundle/device_half.web.onnx", verify=context)
        assert graph.content == (tmp_path / "bundle" / "device_half.web.onnx").read_bytes()
        offered = ["moa.v1", bearer()]
        own = {"ssl": context, "subprotocols": offered, "compression": None, "close_timeout": 1}
        with connect(f"wss://{address}/v1/session", origin=f"https://{address}", **own) as opened:
            opened.send(hello())
            assert opened.recv(TIMEOUT_S)
        # A page that was loaded without TLS is another origin.
        asked = {"Authorization": f"Bearer {TOKEN}", "Origin": f"http://{address}"}
        assert httpx.get(f"https://{address}/v1/status", verify=context, headers=asked).status_code == 403


def test_a_renewed_certificate_is_served_without_a_new_start(tmp_path, monkeypatch):
    monkeypatch.setattr("moa_server.process._RENEW_SECONDS", 0.05)
    long_ago = own_certificate(tmp_path, [], datetime.now(timezone.utc) - timedelta(days=390))
    renewed = threading.Event()

    def renew() -> None:
        own_certificate(tmp_path, [])
        renewed.set()

    def ends(port: int) -> datetime:
        pem = ssl.get_server_certificate(("127.0.0.1", port))
        return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc

    options = {"tls": (long_ago.file, long_ago.file), "renew_tls": renew}
    with serving(ToyEngine(), Settings(), **options) as verifier:
        assert renewed.wait(TIMEOUT_S)
        soon = datetime.now(timezone.utc) + timedelta(days=300)
        eventually(lambda: ends(verifier.port) > soon)
