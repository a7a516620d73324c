"""Pairing with phones: this machine's addresses, a QR code for the terminal, and instructions to trust it."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from moa_runtime.checked_file import read_checked
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.optional_deps import install_command
from moa_runtime.sockets import is_loopback
from moa_server.auth import random_token

AUTHORITY_PATH = "/ca.crt"

#: Addresses of documentation (RFC 5737, 3849): nothing is sent there, but a route to them says which address is ours.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_QUIET_ZONE = 2  # the standard says 4, scanners are content with less, and a terminal has few lines


def hosts_of(host: str) -> list[str]:
    """Return the addresses, then the names, under which other machines reach a verifier that listens on ``host``.

    Args:
        host: an address, a name, or ``0.0.0.0`` or ``::`` for all addresses.
    """
    if host not in ("0.0.0.0", "::", ""):
        return [host]
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    return [each for each in dict.fromkeys(_addresses(families)) if _reachable(each)] + _names()


def page_urls(scheme: str, hosts: Iterable[str], port: int) -> list[str]:
    """Return the page's URL for each host."""
    usual = port == {"http": 80, "https": 443}[scheme]
    return [f"{scheme}://{f'[{host}]' if ':' in host else host}{'' if usual else f':{port}'}/" for host in hosts]


def link_with_token(url: str, token: str) -> str:
    """Return the page's URL with the token in its fragment, which a browser does not send."""
    return f"{url}#token={quote(token, safe='')}" if token else url


def qr_code(text: str) -> str | None:
    """Return a QR code for a terminal, black on white in every colour scheme; None without segno."""
    if importlib.util.find_spec("segno") is None:
        return None
    import segno

    matrix = segno.make(text, error="l", micro=False, boost_error=False).matrix
    width = len(matrix) + 2 * _QUIET_ZONE
    blank = [0] * width
    rows = [[*[0] * _QUIET_ZONE, *row, *[0] * _QUIET_ZONE] for row in matrix]
    rows = [*[blank] * _QUIET_ZONE, *rows, *[blank] * (_QUIET_ZONE + len(matrix) % 2)]
    # Two modules in a character: the upper one is its ink where the block is an upper half.
    shown = {(0, 0): " ", (1, 0): "▀", (0, 1): "▄", (1, 1): "█"}
    lines = (
        "".join(shown[pair] for pair in zip(upper, lower, strict=True))
        for upper, lower in zip(rows[::2], rows[1::2], strict=True)
    )
    return "\n".join(f"\x1b[30;107m{line}\x1b[0m" for line in lines)


def invitation(
    urls: Sequence[str], *, token: str, token_from: str, fingerprint: str | None, secure: bool, drawn: bool
) -> str:
    """Return the message to the operator once clients may connect.

    Args:
        urls: of the page, the best one first; none where this machine knows no address of its own.
        token: for the QR code; empty if none is required or it is unknown.
        token_from: source of the token that the page asks for; empty if none is required.
        fingerprint: of the authority that a phone must trust; None if the certificate is the operator's own.
        secure: whether the page is served over TLS.
        drawn: whether to show a QR code: on a terminal only, for it contains the token and must not get into a log.
    """
    if not urls:
        return "moa-serve: this machine knows no address of its own; name one with --host"
    lines = [f"moa-serve: the page: {'  '.join(urls)}"]
    if token_from:
        lines.append(f"It asks for a token: {token_from}.")
    here = urls[0].rstrip("/")
    own_token = " --token TOKEN" if token_from else ""
    laptop = f"moa-chat --server {here} --tls-ca ca.crt{own_token}"
    if is_loopback(urlsplit(here).hostname or ""):
        if fingerprint is not None:
            lines += [
                f"To connect from a program, fetch {here}{AUTHORITY_PATH}, check that its SHA-256 fingerprint is",
                f"  {fingerprint}",
                f"and run: {laptop}",
            ]
        return "\n".join(lines)
    if drawn:
        code = qr_code(link_with_token(urls[0], token))
        lines.append(code or f"{install_command('web')} draws a QR code of it here.")
        if code and token:
            lines.append("The code contains the token: anyone with a picture of it can use this verifier.")
    if fingerprint is not None:
        lines += [
            f"A phone must trust this verifier's authority once: open {here}{AUTHORITY_PATH} there,",
            "past the browser's warning, and install what it downloads. Its SHA-256 fingerprint is",
            f"  {fingerprint}",
            "Android: Settings, Security, Encryption & credentials, Install a certificate, CA certificate.",
            "iOS: Settings, Profile downloaded; then switch it on in General, About, Certificate Trust Settings.",
            f"On a laptop, fetch and check the same file, then run: {laptop}",
        ]
    elif not secure:
        lines.append(
            "Without TLS a browser lets the page store and compute nothing on the phone: it only works online. "
            "--tls-cert auto makes it whole."
        )
    return "\n".join(lines)


def kept_token(file: Path) -> str:
    """Read the token in a private file, or make it if the file does not exist: phones keep it across restarts.

    Raises:
        MoaError: the file cannot be read or written.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as made:
                made.write(random_token(24))
        token = read_checked(file).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it contains bytes that are not ASCII"
        text = f"no token can be kept in {file}: {reason}; set MOA_EDGE_PROFILE to a folder of your own"
        raise MoaError(text, code="not_writable") from error
    if not token:
        raise MoaError(f"the file {file} has no token: remove it, and one is made", code="token_missing")
    return token


def _addresses(families: Iterable[int]) -> Iterator[str]:
    """Yield the addresses that have a route to elsewhere, then those of this machine's name."""
    for family, elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError):  # no such network
            if family in families:
                with socket.socket(family, socket.SOCK_DGRAM) as routed:
                    routed.connect((elsewhere, 9))
                    yield str(routed.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        yield from (str(address[0]) for family, _, _, _, address in found if family in families)


def _reachable(address: str) -> bool:
    """Whether other machines can use an address: neither loopback nor link-local."""
    number = ipaddress.ip_address(address.partition("%")[0])
    return not (number.is_loopback or number.is_link_local or number.is_unspecified)


def _names() -> list[str]:
    """Return this machine's name; a bare one with ``.local``, as multicast DNS announces it."""
    name = socket.gethostname().lower().rstrip(".")
    if not _NAME.fullmatch(name) or name.startswith("localhost"):
        return []
    return [name if "." in name else f"{name}.local"]
