"""Listening sockets and access to them: pages by origin and host, other programs by a bearer token."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Collection

from moa_runtime.errors import MoaError

_HOST = re.compile(r"(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:@/\\?#\[\]]+))(?::[0-9]*)?")
# As browsers write it: in lower case, without a path, and with a port only if it is not the scheme's own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*A-Z]+")
_NO_PAGE = ("*", "null", "file://")
_OWN_PORT = re.compile(r"http://.*:80|https://.*:443")


def is_loopback(host: str) -> bool:
    """Return whether a name or address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket (port 0: any free one); clients that connect before it is served wait in its queue.

    Raises:
        MoaError: there is no such address, or the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason: object = getattr(error, "strerror", None) or error
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
            reason = os.strerror(error.errno)  # without the address, which Python adds as a tuple
        raise MoaError(f"cannot listen on {host} port {port}: {reason}", code="cannot_listen") from error


def url_of(scheme: str, listening: socket.socket, path: str) -> str:
    """Return the URL for clients on this machine."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


def check_origins(origins: Collection[str]) -> None:
    """Raise MoaError for what no ``Origin`` header can be: it would silently allow nothing."""
    for origin in origins:
        if origin in _NO_PAGE or (_ORIGIN.fullmatch(origin) and not _OWN_PORT.fullmatch(origin)):
            continue
        raise MoaError(
            f"--allow-origin {origin!r} is no origin as browsers send it: scheme and host in lower case, a port only "
            "if it is not the usual one, and no path, such as https://app.example; or capacitor://localhost, "
            "file://, null or *",
            code="bad_origin",
        )


def check_hosts(hosts: Collection[str]) -> None:
    """Raise MoaError for what no ``Host`` header names: it would silently allow nothing."""
    for host in hosts:
        written = f"[{host}]" if names_address(f"[{host}]") else host
        if host_name(written) != host.lower().removesuffix("."):
            text = f"--allow-host {host!r} is no host: expected a name alone, such as verifier.example, or *"
            raise MoaError(text, code="bad_host")


def fits_header(token: str) -> bool:
    """Return whether an ``Authorization`` header can carry a bearer token."""
    return token == token.strip() and all(32 <= ord(char) < 127 for char in token)


def check_token(token: str, option: str, variable: str) -> None:
    """Raise MoaError for a bearer token that no ``Authorization`` header can carry.

    Args:
        option, variable: the two places where the user may have given it.
    """
    if not fits_header(token):
        text = f"the token may only hold ASCII letters, digits, signs and inner spaces: check {option} or {variable}"
        raise MoaError(text, code="not_ascii")


def origin_allowed(origin: str | None, allowed: Collection[str]) -> bool:
    """Return whether a request with this ``Origin`` header may be answered.

    Any web page that a user opens can send requests to the user's own machine, WebSockets included. The browser names
    the page in ``Origin``, even if its server passes the machine's address off as its own (DNS rebinding).

    Args:
        origin: None without the header: the request is not from a web page.
        allowed: origins such as ``http://localhost:3000``, compared letter by letter; ``*`` is all, also ``null``.
    """
    return origin is None or not {origin, "*"}.isdisjoint(allowed)


def own_origin(origin: str, host: str | None, secure: bool) -> bool:
    """Return whether an ``Origin`` header is that of a page of this server.

    Args:
        host: the request's ``Host``; None without the header.
        secure: whether the request came over TLS. If not, the page may still be ``https``: a proxy in front may
            terminate TLS.
    """
    schemes = ("https",) if secure else ("http", "https")
    return host is not None and origin in [f"{scheme}://{host.lower()}" for scheme in schemes]


def names_address(host: str) -> bool:
    """Return whether a ``Host`` header is an IP address, with or without a port: no DNS answer can forge one."""
    try:
        ipaddress.ip_address(host_name(host) or "")
    except ValueError:
        return False
    return True


def host_allowed(host: str | None, listening_on_loopback: bool, extra: Collection[str] = ()) -> bool:
    """Return whether a request with this ``Host`` header may be answered.

    For a browser, a page whose name is made to resolve to 127.0.0.1 (DNS rebinding) has the same origin as our server:
    its GET requests come without ``Origin``. But ``Host`` still has the page's name.

    Args:
        host: ``localhost``, a loopback address, or one of ``extra``, with any port and case and a trailing dot; None
            without the header, which browsers always send.
        listening_on_loopback: if not, every host is allowed, for a server does not know its public names.
        extra: further names, such as of a proxy in front; ``*`` is all of them.
    """
    if host is None or not listening_on_loopback or "*" in extra:
        return True
    name = host_name(host)
    if name is None:
        return False
    return is_loopback(name) or name in {each.lower().removesuffix(".") for each in extra}


def host_name(host: str) -> str | None:
    """Return the lower-case name or address in a ``Host`` header; None if it is malformed."""
    matched = _HOST.fullmatch(host)
    return (matched["literal"] or matched["name"]).lower().removesuffix(".") if matched else None


def bearer_matches(authorization: str, token: str) -> bool:
    """Return whether an ``Authorization`` header carries ``token``, in constant time; an empty token asks for none."""
    scheme, _, presented = authorization.strip().partition(" ")
    return not token or (scheme.lower() == "bearer" and hmac.compare_digest(presented.strip().encode(), token.encode()))
