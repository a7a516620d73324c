"""Sockets that programs of ours listen on."""

from __future__ import annotations

import ipaddress
import socket

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
