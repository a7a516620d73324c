"""Why there is no connection to the verifier, in a sentence that says what to do."""

from __future__ import annotations

import socket
import ssl

from websockets.exceptions import (
    InvalidHandshake,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    ProxyError,
    WebSocketException,
)

from moa_runtime.errors import MoaError

#: What OpenSSL says of an answer that is none of TLS's.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"}


class ConnectError(MoaError):
    """The verifier cannot be reached or refuses the connection."""

    def __init__(self, text: str, *, final: bool) -> None:
        super().__init__(text)
        self.final = final  # trying again with the same settings cannot help


def unexpected_error(address: str, error: BaseException) -> ConnectError:
    """A defect that ended the link, as a user should hear it: with its name, as nothing else is known of it."""
    failed = ConnectError(f"the connection to {address} failed unexpectedly: {error!r}", final=True)
    failed.__cause__ = error
    return failed


def connect_error(address: str, error: Exception, within_s: float, *, proxied: bool) -> ConnectError:
    """What ``websockets`` raised for ``address``, as a user should hear it.

    Args:
        within_s: seconds in which a connection had to stand.
        proxied: whether the environment names a proxy for it.
    """
    if proxied and (problem := _bad_proxy(error)):
        return ConnectError(f"the proxy that the environment names {problem}", final=True)
    if isinstance(error, InvalidStatus):
        return _refused(address, error.response.status_code)
    if isinstance(error, InvalidURI):
        return ConnectError(f"{address} is no verifier address: expected ws://HOST:PORT", final=True)
    unreachable = proxied and isinstance(error, OSError) and not isinstance(error, ssl.SSLError | TimeoutError)
    if unreachable or isinstance(error, ProxyError):
        text = f"the proxy that the environment names does not lead to {address} ({error})"
        return ConnectError(f"{text}: set no_proxy, or mend https_proxy", final=False)
    if isinstance(error, InvalidHandshake):
        return _no_handshake(address, error)
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of {address} is not trusted ({error.verify_message})"
        return ConnectError(f"{text}; pass its certificate authority with --tls-ca", final=True)
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        text = f"what answers at {address} does not speak TLS"
        return ConnectError(f"{text}: use ws://, or start moa-serve with --tls-cert and --tls-key", final=True)
    if isinstance(error, socket.gaierror):
        text = f"the host of {address} is not known to the network's name service"
        return ConnectError(f"{text}: check the name, and whether there is a network", final=False)
    if isinstance(error, TimeoutError):
        text = f"nothing answers at {address} within {within_s:g} s"
        if proxied:
            text += " through the proxy that the environment names: set no_proxy, mend https_proxy, or wait"
            return ConnectError(text, final=False)
        return ConnectError(f"{text}: a verifier may still be starting", final=False)
    if isinstance(error, OSError | EOFError | WebSocketException):
        return ConnectError(f"no verifier answers at {address}; start one with moa-serve", final=False)
    return unexpected_error(address, error)


def _bad_proxy(error: Exception) -> str:
    """What is wrong with the proxy itself; empty if nothing is. Its address may hold a password and is not repeated."""
    if isinstance(error, ImportError):
        return "is a SOCKS proxy, which needs python-socks: pip install 'python-socks[asyncio]', or set no_proxy"
    if isinstance(error, InvalidProxy) or (isinstance(error, ValueError) and not isinstance(error, OSError)):
        return "has no valid address: expected http://HOST:PORT or socks5h://HOST:PORT, or set no_proxy"
    return ""


def _refused(address: str, status: int) -> ConnectError:
    if status in (401, 403):
        return ConnectError(f"the verifier at {address} refused the token; check --token", final=True)
    if 300 <= status < 400:
        text = f"{address} sends its clients elsewhere (HTTP {status}), which is not followed"
        return ConnectError(f"{text}: name the verifier's own address", final=True)
    if status == 503:
        return ConnectError(f"the verifier at {address} is full or shutting down", final=False)
    final = 400 <= status < 500 and status not in (408, 429)
    return ConnectError(f"{address} answered HTTP {status}: is it a moa-edge verifier?", final=final)


def _no_handshake(address: str, error: InvalidHandshake) -> ConnectError:
    if isinstance(error.__cause__, EOFError):  # as of a verifier that is killed, or still starting behind a proxy
        hint = "; if it speaks TLS, use wss://" if address.startswith("ws:") else ""
        return ConnectError(f"{address} closed the connection without an answer{hint}", final=False)
    return ConnectError(f"{address} does not speak WebSocket: is it a moa-edge verifier?", final=True)
