"""The certificate of ``--tls-cert auto``: what trusts its authority trusts it, for these hosts and no others."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509

from moa_server.settings import Settings
from moa_server.web import certificate as module
from moa_server.web.certificate import own_certificate
from support.refusals import refused
from support.server.edge_running import eventually, is_closed
from support.server.running import TIMEOUT_S, serving
from support.toy_engine import ToyEngine

NOW = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)
HOSTS = ["192.168.1.20", "fd12::20", "laptop.local"]


def trusting(authority: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.decode())


def handshake(file: Path, authority: bytes, host: str) -> None:
    """Raises SSLError if a client that trusts the authority would not talk to this host."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(file, file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(authority).wrap_bio(to_client, to_server, server_hostname=host)
    server = served.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


def test_a_client_that_trusts_the_authority_trusts_these_hosts_alone(tmp_path):
    made = own_certificate(tmp_path / "web", HOSTS)
    for host in (*HOSTS, "localhost", "127.0.0.1", "::1"):
        handshake(made.file, made.authority, host)
    for host in ("192.168.1.21", "other.local", "example.com"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(made.file, made.authority, host)
    other = own_certificate(tmp_path / "other", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.file, other.authority, HOSTS[0])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (made.file.parent, *made.file.parent.iterdir())}
    assert modes == {"web": 0o700, "authority.pem": 0o600, "server.pem": 0o600}
    assert b"PRIVATE" not in made.authority


@pytest.mark.parametrize("host", ["example.com", "8.8.8.8"])
def test_a_stolen_authority_speaks_for_no_site_of_the_internet(tmp_path, host):
    made = own_certificate(tmp_path, HOSTS)
    stolen = module._read(tmp_path / "authority.pem")
    forged = module._new_server(stolen, [host], datetime.now(timezone.utc))
    (tmp_path / "forged.pem").write_bytes(forged.pem())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "forged.pem", made.authority, host)


def test_it_is_kept_until_it_is_renewed_before_it_ends(tmp_path):
    first = own_certificate(tmp_path, HOSTS, NOW)
    kept = first.file.read_bytes()
    assert own_certificate(tmp_path, HOSTS[1:], NOW + timedelta(days=300)) == first
    assert first.file.read_bytes() == kept and first.ends == NOW + timedelta(days=397)
    later = own_certificate(tmp_path, HOSTS, NOW + timedelta(days=340))
    assert later.ends == NOW + timedelta(days=340 + 397)
    assert (later.authority, later.fingerprint) == (first.authority, first.fingerprint)
    # iOS takes no certificate of more than 825 days.
    served = x509.load_pem_x509_certificate(later.file.read_bytes())
    assert served.not_valid_after_utc - served.not_valid_before_utc < timedelta(days=825)
    last = own_certificate(tmp_path, HOSTS, NOW + timedelta(days=3650 - 300))  # the authority ends
    assert last.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("hosts", "same"), [(["10.1.2.3", "other.local"], True), (["203.0.113.7", "moa.example.com"], False)]
)
def test_an_address_of_the_internet_needs_another_authority(tmp_path, hosts, same):
    first, moved = own_certificate(tmp_path, HOSTS), own_certificate(tmp_path, hosts)
    assert (moved.authority == first.authority) == same
    for host in hosts:
        handshake(moved.file, moved.authority, host)


@pytest.mark.parametrize("name", ["authority.pem", "server.pem"])
@pytest.mark.parametrize(
    "content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None]
)
def test_a_broken_or_foreign_file_is_made_anew(tmp_path, name, content):
    own_certificate(tmp_path, HOSTS)
    own_certificate(tmp_path / "other", HOSTS)
    foreign = (tmp_path / "other" / "server.pem").read_bytes()
    (tmp_path / name).write_bytes(foreign if content is None else content)
    made = own_certificate(tmp_path, HOSTS)
    handshake(made.file, made.authority, HOSTS[0])


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("not_writable"):
        own_certificate(tmp_path / "file" / "web", HOSTS)
    with refused("not_ascii"):
        own_certificate(tmp_path, ["lärm.local"])


def test_a_renewed_certificate_is_served_without_a_new_start(tmp_path, monkeypatch):
    monkeypatch.setattr("moa_server.process._RENEW_SECONDS", 0.05)
    now = datetime.now(timezone.utc)
    long_ago = own_certificate(tmp_path, [], now - timedelta(days=390))
    renewed, times = threading.Event(), [now - timedelta(days=30), now + timedelta(days=340)]

    def renew() -> None:
        own_certificate(tmp_path, [], times.pop(0) if len(times) > 1 else times[0])
        renewed.set()

    def is_new(port: int) -> bool:
        try:
            pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=TIMEOUT_S)
        except (ConnectionError, ssl.SSLError):  # a renewal ends connections, during their handshake too
            return False
        return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc > now + timedelta(days=600)

    options = {"tls": (long_ago.file, long_ago.file), "renew_tls": renew}
    with serving(ToyEngine(), Settings(), **options) as verifier:
        eventually(lambda: is_new(verifier.port))
        # What served the certificates before accepts nothing any more.
        eventually(lambda: sum(not ended.done() for _, ended in verifier.server._workers) == 1)
        with socket.create_connection(("127.0.0.1", verifier.port), TIMEOUT_S) as kept:
            renewed.clear()
            assert renewed.wait(TIMEOUT_S)
            renewed.clear()  # the second round begins after the first has looked at the certificate
            assert renewed.wait(TIMEOUT_S)
            assert not is_closed(kept), "only a new certificate ends connections"
