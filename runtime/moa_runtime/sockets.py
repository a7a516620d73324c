"""Sockets that programs of ours listen on."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection

from moa_runtime.errors import MoaError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of this name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; clients that connect before it is served wait in its queue.

    Args:
        port: 0 for any free one.

    Raises:
        MoaError: no such address, or the port is taken; the message says why.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MoaError(f"cannot listen on {host} port {port}: {reason}") from error


def url_of(scheme: str, listening: socket.socket, path: str) -> str:
    """The address that clients on this machine use."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


_HOST = re.compile(r"(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:@/\\?#\[\]]+))(?::[0-9]*)?")
# As browsers write it: in lower case, without a path, and a port only where it is not the scheme's own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*A-Z]+")
_NO_PAGE = ("*", "null", "file://")
_OWN_PORT = re.compile(r"http://.*:80|https://.*:443")


def check_origins(origins: Collection[str]) -> None:
    """Refuse what no ``Origin`` header can be, so that it does not let in nobody in silence.

    Args:
        origins: as :func:`origin_allowed` takes them.

    Raises:
        MoaError: the message says what is expected.
    """
    for origin in origins:
        if origin in _NO_PAGE or (_ORIGIN.fullmatch(origin) and not _OWN_PORT.fullmatch(origin)):
            continue
        raise MoaError(
            f"--allow-origin {origin!r} is no origin as browsers send it: scheme and host in lower case, a port only "
            "where it is not the usual one, and no path, such as https://app.example; or capacitor://localhost, "
            "file://, null or *"
        )


def origin_allowed(origin: str | None, allowed: Collection[str]) -> bool:
    """Whether a request with this ``Origin`` header may be answered.

    Any web page that somebody opens can send requests to his own machine, WebSockets included; its browser names the
    page in ``Origin``, also where the page's server passes the machine's address off as its own (DNS rebinding).

    Args:
        origin: None without the header: not from a web page.
        allowed: origins such as ``http://localhost:3000``, compared letter by letter; ``*`` is all of them, ``null``
            among them.
    """
    return origin is None or not {origin, "*"}.isdisjoint(allowed)


def own_origin(origin: str, host: str | None, secure: bool) -> bool:
    """Whether an ``Origin`` header is that of a page which came from the server that is asked.

    Args:
        host: the request's ``Host``; None without the header.
        secure: whether the request came over TLS. If not, the page may be ``https`` all the same: a proxy in front does
            the TLS.
    """
    schemes = ("https",) if secure else ("http", "https")
    return host is not None and origin in [f"{scheme}://{host.lower()}" for scheme in schemes]


def names_address(host: str) -> bool:
    """Whether a ``Host`` header is an IP address, with or without a port: one that no DNS answer can make its own."""
    matched = _HOST.fullmatch(host)
    if matched is None:
        return False
    try:
        ipaddress.ip_address(matched["literal"] or matched["name"])
    except ValueError:
        return False
    return True


def host_allowed(host: str | None, listening_on_loopback: bool, extra: Collection[str] = ()) -> bool:
    """Whether a request with this ``Host`` header may be answered.

    A page whose name is made to resolve to 127.0.0.1 (DNS rebinding) is, for a browser, of the same origin as our
    server: its GET requests come without ``Origin``. But ``Host`` still has the page's name.

    Args:
        host: ``localhost``, a loopback address, or one of ``extra``, with any port and case and a trailing dot; None
            without the header, which browsers always send.
        listening_on_loopback: else every host is allowed, for a server does not know its public names.
        extra: further names, such as of a proxy in front; ``*`` is all of them.
    """
    if host is None or not listening_on_loopback or "*" in extra:
        return True
    matched = _HOST.fullmatch(host)
    if matched is None:
        return False
    name = (matched["literal"] or matched["name"]).lower().removesuffix(".")
    return is_loopback(name) or name in {each.lower().removesuffix(".") for each in extra}


def bearer_matches(authorization: str, token: str) -> bool:
    """Whether an ``Authorization`` header carries ``token``, compared in constant time; an empty one asks for none."""
    return not token or hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())
