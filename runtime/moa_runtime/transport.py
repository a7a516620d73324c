"""The WebSocket to the verifier: connects, reconnects, and moves whole frames both ways."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as _connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    ProxyError,
    WebSocketException,
)

from moa_runtime.address import Address
from moa_runtime.errors import MoaError
from moa_runtime.sockets import fits_header, is_loopback
from moa_runtime.timeline import NO_TIMELINE, Timeline

#: Header of the upgrade request with the conversation's id, by which a proxy finds the verifier that holds it.
#: Browsers, which can set no headers, send a query parameter of this name.
SESSION_ID_HEADER = "x-session-id"
_SESSION_ID = re.compile(r"[0-9a-f]{32}")
#: Size limit of a frame from the verifier; the largest ones, of memory rows, have some 300 kB.
_MOST_FRAME_BYTES = 4 << 20
#: Most bytes of unprocessed frames (while the device drafts, say); no more are read beyond it.
_MOST_WAITING_BYTES = 16 << 20
#: OpenSSL's reasons if the other end does not speak TLS.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"}


class ConnectError(MoaError):
    """The verifier cannot be reached or refuses the connection; if ``final``, another attempt could not succeed."""

    def __init__(self, text: str, *, final: bool, code: str) -> None:
        super().__init__(text, code=code)
        self.final = final


def unexpected_error(address: str, error: BaseException) -> ConnectError:
    """Return a defect that ended the link as an error that names it."""
    failed = ConnectError(f"the connection to {address} failed unexpectedly: {error!r}", final=True, code="defect")
    failed.__cause__ = error
    return failed


def connect_error(
    address: str, error: Exception, within_s: float, *, proxied: bool, token: bool = False
) -> ConnectError:
    """Return what ``websockets`` raised for ``address`` as an error that says what to do.

    Args:
        token: whether one was sent.
        within_s: seconds after which the attempt was given up.
        proxied: whether the environment names a proxy for it. Its address may hold a password and is not repeated.
    """
    proxy = "the proxy that the environment names"
    if proxied and isinstance(error, ImportError):
        text = f"{proxy} is a SOCKS proxy, and needs python-socks: pip install 'python-socks[asyncio]', or set no_proxy"
        return ConnectError(text, final=True, code="missing_package")
    if proxied and (
        isinstance(error, InvalidProxy) or (isinstance(error, ValueError) and not isinstance(error, OSError))
    ):
        text = f"{proxy} has no valid address: expected http://HOST:PORT or socks5h://HOST:PORT, or set no_proxy"
        return ConnectError(text, final=True, code="bad_proxy")
    if isinstance(error, InvalidStatus):
        return status_error(address, error.response.status_code, token=token)
    if isinstance(error, InvalidURI):
        return ConnectError(
            f"{address} is no verifier address: expected ws://HOST:PORT", final=True, code="bad_address"
        )
    unreachable = proxied and isinstance(error, OSError) and not isinstance(error, ssl.SSLError | TimeoutError)
    if unreachable or isinstance(error, ProxyError):
        text = f"{proxy} does not lead to {address} ({error}): set no_proxy, or mend https_proxy"
        return ConnectError(text, final=False, code="proxy_failed")
    if isinstance(error, InvalidHandshake):
        if not isinstance(error.__cause__, EOFError):
            text = f"{address} does not speak WebSocket: is it a moa-edge verifier?"
            return ConnectError(text, final=True, code="no_websocket")
        # Possible causes: a verifier that was killed, or one that is still starting behind a proxy.
        hint = "; if it speaks TLS, use wss://" if address.startswith("ws:") else ""
        text = f"{address} closed the connection without an answer{hint}"
        return ConnectError(text, final=False, code="no_answer")
    if refused := tls_error(address, error):
        return refused
    if isinstance(error, socket.gaierror):
        text = f"the name service does not know the host of {address}: check the name, and whether there is a network"
        return ConnectError(text, final=False, code="unknown_host")
    if isinstance(error, TimeoutError):
        advice = ": a verifier may still be starting"
        if proxied:
            advice = f" through {proxy}: set no_proxy, mend https_proxy, or wait"
        text = f"nothing answers at {address} within {within_s:g} s{advice}"
        return ConnectError(text, final=False, code="timeout")
    if isinstance(error, OSError | EOFError | WebSocketException):
        text = f"no verifier answers at {address}; start one with moa-serve"
        return ConnectError(text, final=False, code="unreachable")
    return unexpected_error(address, error)


def status_error(address: str, status: int, *, token: bool) -> ConnectError:
    """Return what an HTTP status that is no success says, for sessions and downloads.

    Args:
        token: whether one was sent.
    """
    if status == 401:
        what = "refused the token: ask its operator for the right one"
        text = f"the verifier at {address} {what if token else 'needs a token: give one (--token, MOA_TOKEN)'}"
        return ConnectError(text, final=True, code="unauthorized")
    if status == 403:
        text = f"{address} refused the connection (HTTP 403): check the address, with its path behind a proxy"
        return ConnectError(text, final=True, code="forbidden")
    if status == 421:
        text = f"the verifier behind {address} does not answer for this host: its moa-serve needs --allow-host NAME"
        return ConnectError(text, final=True, code="host_refused")
    if 300 <= status < 400:
        text = f"{address} sends its clients elsewhere (HTTP {status}), which is not followed: name its own address"
        return ConnectError(text, final=True, code="redirect")
    if status == 503:
        return ConnectError(f"the verifier at {address} is full or shutting down", final=False, code="overloaded")
    final = 400 <= status < 500 and status not in (408, 429)
    text = f"{address} answered HTTP {status}: check that this is a moa-edge verifier's address"
    return ConnectError(text, final=final, code="http_status")


def tls_error(address: str, error: BaseException) -> ConnectError | None:
    """Return what a failed handshake of TLS says, for sessions and downloads; None if another attempt may succeed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        authority = Address.parse(address).at("/ca.crt")
        text = (
            f"the certificate of {address} is not trusted ({error.verify_message}); pass its certificate authority "
            f"with --tls-ca (that of moa-serve --tls-cert auto is at {authority}: compare its fingerprint)"
        )
        return ConnectError(text, final=True, code="untrusted_certificate")
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        text = f"{address} does not speak TLS: use ws://, or start moa-serve with --tls-cert and --tls-key"
        return ConnectError(text, final=True, code="no_tls")
    return None


def new_session_id() -> str:
    """Return 32 random hexadecimal digits. They are no secret: knowing them gives access to nothing."""
    return secrets.token_hex(16)


def checked_session_id(value: object) -> str:
    """Return ``value``, which comes from a file; raise ValueError if it is no session id."""
    if not isinstance(value, str) or not _SESSION_ID.fullmatch(value):
        raise ValueError(f"{value!r:.60} is no session id, which has 32 hexadecimal digits")
    return value


class _Connect(_connect):
    """Follow no redirect: the conversation is for the verifier that the user named."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class _Socket(socket.socket):
    """Report a lost connection to its reader alone.

    When a write fails, asyncio drops the connection at once, with all that came and was not read: a last verdict, a
    fault or the close frame.
    """

    def send(self, data: Any, flags: int = 0, /) -> int:
        try:
            return super().send(data, flags)
        except ConnectionError:
            return len(data)

    def sendmsg(self, buffers: Iterable[Any], *options: Any) -> int:
        parts = list(buffers)
        try:
            return super().sendmsg(parts, *options)
        except ConnectionError:
            return sum(map(len, parts))


async def connect(address: str, *, proxy: str | None, open_timeout: float, **options: Any) -> ClientConnection:
    """Open a WebSocket; through a proxy, on a socket of websockets' own."""
    if not proxy:
        connecting = asyncio.ensure_future(_connected(address))
        try:  # not wait_for: TimeoutError is another class in asyncio before Python 3.11
            if not (await asyncio.wait({connecting}, timeout=open_timeout))[0]:
                raise TimeoutError
            options["sock"] = connecting.result()
        finally:
            connecting.cancel()
    return await _Connect(address, proxy=proxy, open_timeout=open_timeout, **options)


@dataclass(frozen=True)
class Endpoint:
    """The verifier's address. ``token`` is the bearer token; ``tls`` is used for ``wss`` addresses."""

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        """The WebSocket's address, see :class:`moa_runtime.address.Address`. Raises ConnectError if it is none."""
        try:
            return Address.parse(self.url).session
        except ValueError as error:
            text = f"{self.url!r} is no verifier address: expected ws://HOST:PORT"
            raise ConnectError(text, final=True, code="bad_address") from error

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the token, if there is one. Raises ConnectError if no header can carry it."""
        if not fits_header(self.token):
            text = "the token may only hold ASCII letters, digits, signs and inner spaces: check it"
            raise ConnectError(text, final=True, code="not_ascii")
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def proxy(self) -> str | None:
        """The proxy that the environment or the system names for the address; None for this machine."""
        parts = urlsplit(self.address)
        host, secure = parts.hostname or "", parts.scheme == "wss"
        if is_loopback(host) or proxy_bypass(f"{host}:{parts.port or (443 if secure else 80)}"):
            return None
        # The order of websockets, which leaves out `all`.
        names = ("wss", "socks", "https", "all") if secure else ("ws", "socks", "https", "http", "all")
        proxies = getproxies()
        name = next((name for name in names if proxies.get(name)), "")
        # Systems name a SOCKS proxy without its version.
        return proxies[name].replace("http://", "socks5h://", 1) if name == "socks" else proxies.get(name)

    @property
    def context(self) -> ssl.SSLContext | None:
        """``tls``, or a context with the system's authorities; None for an address without encryption."""
        return (self.tls or ssl.create_default_context()) if self.address.startswith("wss:") else None


@dataclass(frozen=True)
class Timing:
    """Times of a link, seconds. It is dropped after ``ping_interval + ping_timeout`` without a pong.

    The delay before an attempt to connect doubles from ``first_backoff`` to ``longest_backoff``, until a connection has
    lasted longer than that: a verifier that fails after each Hello is not asked hundreds of times.
    """

    open_timeout: float = 5.0
    welcome_timeout: float = 20.0
    ping_interval: float = 4.0
    ping_timeout: float = 4.0
    first_backoff: float = 0.25
    longest_backoff: float = 4.0


@dataclass(frozen=True)
class TransportHandlers:
    """Called in the event loop's thread, in the order of what happens on the link.

    ``held``: no attempt is made for now, see :meth:`Transport.hold`. ``closed`` also gets the seconds until the next
    attempt to connect, or None.
    """

    held: Callable[[], None]
    connecting: Callable[[], None]
    opened: Callable[[], None]
    frame: Callable[[bytes], None]
    closed: Callable[[ConnectError, float | None], None]


class Transport:
    """One connection after the other, while :meth:`run` runs. Sending never blocks the caller.

    Args:
        timeline: gets a span ``send`` on the track ``link`` for each frame, until the socket has room again.
        session_id: of the conversation, for proxies; one for all connections of this transport when omitted.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        handlers: TransportHandlers,
        timing: Timing | None = None,
        timeline: Timeline | None = None,
        session_id: str | None = None,
    ) -> None:
        self._endpoint, self._handlers, self._timing = endpoint, handlers, timing or Timing()
        self._session_id = session_id or new_session_id()
        self._timeline = timeline or NO_TIMELINE
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._socket: ClientConnection | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._welcomed = asyncio.Event()
        self._waiting = 0  # bytes that were not taken up
        self._room = asyncio.Event()
        self.bytes_up = 0
        self.bytes_down = 0

    def send(self, frame: bytes) -> None:
        """Queue a frame for the open connection; frames still queued when it closes are dropped."""
        self._outgoing.put_nowait(frame)

    def welcomed(self) -> None:
        """Note that the verifier has answered the Hello of the open connection."""
        self._welcomed.set()

    def taken_up(self, frame: bytes) -> None:
        """Note that a received frame has been processed: its bytes may be received again."""
        self._waiting -= len(frame)
        self._room.set()

    def hold(self, held: bool) -> None:
        """Make no new connection while ``held``; an open one stays."""
        self._wanted.clear() if held else self._wanted.set()

    def drop(self) -> None:
        """Make the next cancellation of :meth:`run` not wait for the other end, which may be unreachable."""
        if self._socket is not None:
            self._socket.close_timeout = 0.0

    async def run(self) -> None:
        """Keep a connection open until cancelled. Returns only after a refusal that trying again cannot mend."""
        clock, backoff = asyncio.get_running_loop().time, self._timing.first_backoff
        while True:
            opened = math.inf
            if not self._wanted.is_set():
                self._handlers.held()
                await self._wanted.wait()
            self._handlers.connecting()
            try:
                async with await self._connect() as socket:
                    opened = clock()
                    await self._pump(socket)
                problem = ConnectError("the connection was closed", final=False, code="closed")
            except ConnectError as error:
                problem = error
            if clock() - opened > self._timing.longest_backoff:
                backoff = self._timing.first_backoff
            self._handlers.closed(problem, None if problem.final else backoff)
            if problem.final:
                return
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._timing.longest_backoff)

    async def _connect(self) -> ClientConnection:
        address, proxy, timing = self._endpoint.address, self._endpoint.proxy, self._timing
        headers = {SESSION_ID_HEADER: self._session_id, **self._endpoint.authorization}
        try:
            return await connect(
                address,
                additional_headers=headers,
                ssl=self._endpoint.context,
                compression=None,  # memory rows do not compress, and phones pay for trying
                max_size=_MOST_FRAME_BYTES,
                proxy=proxy,
                open_timeout=timing.open_timeout,
                ping_interval=timing.ping_interval,
                ping_timeout=timing.ping_timeout,
                close_timeout=1.0,
            )
        except Exception as error:
            proxied, token = proxy is not None, bool(self._endpoint.token)
            raise connect_error(address, error, timing.open_timeout, proxied=proxied, token=token) from error

    async def _pump(self, socket: ClientConnection) -> None:
        """Move frames until the connection closes; raise ConnectError if no Welcome comes."""
        self._welcomed.clear()
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        self._socket = socket
        self._handlers.opened()
        writer = asyncio.create_task(self._write(socket))
        reader = asyncio.create_task(self._read(socket))
        welcome = asyncio.create_task(self._welcomed.wait())
        try:
            within, first = self._timing.welcome_timeout, asyncio.FIRST_COMPLETED
            if not (await asyncio.wait({writer, reader, welcome}, timeout=within, return_when=first))[0]:
                address = self._endpoint.address
                text = f"{address} has not answered the Hello within {within:g} s: is it a moa-edge verifier?"
                raise ConnectError(text, final=False, code="no_welcome")
            for ended in (await asyncio.wait({writer, reader}, return_when=first))[0]:
                ended.result()  # raises a defect, which is no closed connection
            await reader  # after a write that failed: what came before is still to be read
        finally:
            self._socket = None
            for task in (writer, reader, welcome):
                task.cancel()
            await asyncio.gather(writer, reader, welcome, return_exceptions=True)

    async def _write(self, socket: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                frame = await self._outgoing.get()
                self.bytes_up += len(frame)
                with self._timeline.measure("send", "link", bytes=len(frame)):
                    await socket.send(frame)

    async def _read(self, socket: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for frame in socket:
                data = frame.encode() if isinstance(frame, str) else frame
                self.bytes_down += len(data)
                self._waiting += len(data)
                self._handlers.frame(data)
                while self._waiting > _MOST_WAITING_BYTES:
                    self._room.clear()
                    await self._room.wait()


async def _connected(address: str) -> socket.socket:
    """Connect to the first IP address of the host of ``address`` that answers; raise OSError if none does."""
    loop, parts = asyncio.get_running_loop(), urlsplit(address)
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    failure = OSError(f"no address of {parts.hostname}")
    for family, kind, protocol, _, at in await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM):
        try:
            opened = _Socket(family, kind, protocol)
        except OSError as error:  # such as IPv6 on a machine without
            failure = error
            continue
        try:
            opened.setblocking(False)
            await loop.sock_connect(opened, at)
            return opened
        except BaseException as error:
            opened.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise failure
