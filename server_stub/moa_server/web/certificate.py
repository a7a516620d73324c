"""A certificate for a verifier in the home network, from an authority of its own that phones must trust.

No public authority certifies private addresses or names such as ``laptop.local``. A self-signed certificate is not
enough: after its warning is dismissed, a browser still runs no service worker, and phones install authorities only. So
there are two: an authority, installed once on each phone, and a certificate that is renewed under it. The authority's
name constraints limit the harm of a stolen key: it is valid for private addresses and this machine's names only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moa_runtime.atomic_file import replace_private
from moa_runtime.checked_file import read_checked
from moa_runtime.errors import MoaError, reason_of

_AUTHORITY_FILE, _SERVER_FILE = "authority.pem", "server.pem"
# iOS takes at most 825 days of a certificate under an authority that its user has installed (Apple, HT210176).
_AUTHORITY_LIFE, _SERVER_LIFE = timedelta(days=3650), timedelta(days=397)
_RENEWED_BEFORE = timedelta(days=60)
_CLOCKS_DIFFER = timedelta(days=1)

_CRITICAL = (x509.BasicConstraints, x509.KeyUsage, x509.NameConstraints)

#: Private networks: RFC 1918, 6598, 3927, 4193, 4291.
_PRIVATE = (
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
    *("fc00::/7", "fe80::/10", "::1/128"),
)
_PRIVATE_NAMES = ("local", "localhost", "home.arpa")  # and what is below them (RFC 6762, 6761, 8375)


@dataclass(frozen=True)
class OwnCertificate:
    """The verifier's certificate, and the authority that a phone must trust."""

    file: Path  # certificate and private key in PEM, readable by the user alone
    authority: bytes  # the authority's certificate in PEM; public
    fingerprint: str  # SHA-256 of it, as phones and browsers show it: ``AB:CD:...``
    ends: datetime  # expiry of ``file``


class _Pair(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> bytes:
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        private = self.key.private_bytes(encoding, form, serialization.NoEncryption())
        return self.certificate.public_bytes(encoding) + private


def own_certificate(folder: Path, hosts: Sequence[str], now: datetime | None = None) -> OwnCertificate:
    """Return a certificate for these hosts from ``folder``, made or renewed if necessary.

    The authority, which phones trust, is replaced only if it expires or its name constraints exclude a host.

    Args:
        hosts: names and IP addresses of the verifier.
        now: for tests; the present time, with a time zone, without it.

    Raises:
        MoaError: the folder cannot be used, or a host is no name.
    """
    now = now or datetime.now(timezone.utc)
    hosts = list(dict.fromkeys(["localhost", "127.0.0.1", "::1", *hosts]))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _read(folder / _AUTHORITY_FILE)
        if authority is None or not _may_sign(authority, hosts, now):
            authority = _new_authority(hosts, now)
            replace_private(folder / _AUTHORITY_FILE, [authority.pem()])
        served = _read(folder / _SERVER_FILE)
        if served is None or not _still_good(served, authority, hosts, now):
            served = _new_server(authority, hosts, now)
            replace_private(folder / _SERVER_FILE, [served.pem()])
    except OSError as error:
        reason = f"{reason_of(error)}; set MOA_EDGE_PROFILE to a folder of your own"
        text = f"no certificate can be kept in {folder}: {reason}"
        raise MoaError(text, code="not_writable") from error
    return OwnCertificate(
        folder / _SERVER_FILE,
        authority.certificate.public_bytes(serialization.Encoding.PEM),
        authority.certificate.fingerprint(hashes.SHA256()).hex(":").upper(),
        served.certificate.not_valid_after_utc,
    )


def _new_authority(hosts: Sequence[str], now: datetime) -> _Pair:
    mine = next((host for host in hosts if host not in ("localhost", "127.0.0.1", "::1")), "localhost")
    permitted: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_network(network)) for network in _PRIVATE]
    permitted += [x509.DNSName(name) for name in _PRIVATE_NAMES]
    for host in hosts:
        if not _permitted(host, permitted):
            name = _general_name(host)
            if isinstance(name, x509.IPAddress):
                name = x509.IPAddress(ipaddress.ip_network(name.value))
            permitted.append(name)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    extensions = (x509.BasicConstraints(ca=True, path_length=0), usage, x509.NameConstraints(permitted, None))
    return _new(f"moa-serve on {mine}", None, now, _AUTHORITY_LIFE, extensions)


def _new_server(authority: _Pair, hosts: Sequence[str], now: datetime) -> _Pair:
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    signer = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    extensions = (
        x509.BasicConstraints(ca=False, path_length=None),
        usage,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_general_name(host) for host in hosts]),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer),
    )
    return _new("moa-serve", authority, now, _SERVER_LIFE, extensions)


def _new(
    subject: str, authority: _Pair | None, now: datetime, life: timedelta, extensions: Iterable[x509.ExtensionType]
) -> _Pair:
    """Make a key and its certificate with these extensions, signed by ``authority``; None for a self-signed one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])  # the longest allowed (RFC 5280)
    builder = x509.CertificateBuilder().subject_name(name).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _CLOCKS_DIFFER).not_valid_after(now + life).public_key(key.public_key())
    builder = builder.issuer_name(name if authority is None else authority.certificate.subject)
    for extension in (*extensions, x509.SubjectKeyIdentifier.from_public_key(key.public_key())):
        builder = builder.add_extension(extension, isinstance(extension, _CRITICAL))
    return _Pair(builder.sign(key if authority is None else authority.key, hashes.SHA256()), key)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        text = f"no certificate can have the name {host!r}: write it in ASCII (xn--...)"
        raise MoaError(text, code="not_ascii") from error


def _may_sign(authority: _Pair, hosts: Sequence[str], now: datetime) -> bool:
    """Whether the authority outlives a certificate made now, and its name constraints allow all hosts."""
    try:
        constraints = authority.certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:  # not made here
        return False
    lives = authority.certificate.not_valid_after_utc >= now + _SERVER_LIFE
    return lives and all(_permitted(host, constraints.permitted_subtrees or []) for host in hosts)


def _permitted(host: str, subtrees: Sequence[x509.GeneralName]) -> bool:
    name = _general_name(host)
    for tree in subtrees:
        if isinstance(name, x509.IPAddress) and isinstance(tree, x509.IPAddress):
            if name.value in tree.value:  # type: ignore[operator]  # constraints hold networks
                return True
        elif isinstance(tree, x509.DNSName) and f".{host}".endswith(f".{tree.value}"):
            return True
    return False


def _still_good(served: _Pair, authority: _Pair, hosts: Sequence[str], now: datetime) -> bool:
    try:
        served.certificate.verify_directly_issued_by(authority.certificate)
        names = served.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    begun = served.certificate.not_valid_before_utc <= now
    lasts = served.certificate.not_valid_after_utc - now >= _RENEWED_BEFORE
    return begun and lasts and {_general_name(host) for host in hosts} <= set(names)


def _read(path: Path) -> _Pair | None:
    """Read a certificate and its key; None if the file is missing or unusable and must be made again."""
    try:
        data = read_checked(path)
        key = serialization.load_pem_private_key(data, None)
        certificate = x509.load_pem_x509_certificate(data)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        return None
    return _Pair(certificate, key)
