"""The WebSocket to the verifier: connects, reconnects, and moves whole frames both ways."""

from __future__ import annotations

import asyncio
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

from moa_runtime.errors import MoaError
from moa_runtime.sockets import is_loopback
from moa_runtime.timeline import NO_TIMELINE, Timeline

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


#: Of the upgrade request; browsers, which can set none, send a query parameter of this name.
SESSION_ID_HEADER = "x-session-id"
_SESSION_ID = re.compile(r"[0-9a-f]{32}")


def new_session_id() -> str:
    """32 random hexadecimal digits. No secret: it says nothing of the conversation, and opens none."""
    return secrets.token_hex(16)


def checked_session_id(value: object) -> str:
    """``value``, which comes from a file.

    Raises:
        ValueError: it is no session id.
    """
    if not isinstance(value, str) or not _SESSION_ID.fullmatch(value):
        raise ValueError(f"{value!r:.60} is no session id, which has 32 hexadecimal digits")
    return value


SESSION_PATH = "/v1/session"
#: Of a frame that the verifier may send; memory rows are the largest, and come in some 300 kB.
_MOST_FRAME_BYTES = 4 << 20
#: Of frames that nobody has taken up yet, as while the device drafts: then no more are read.
_MOST_WAITING_BYTES = 16 << 20


class _Connect(_connect):
    """Follows no redirect: the conversation is for the verifier that the user named."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class _Socket(socket.socket):
    """Reports a lost connection to its reader alone.

    When a write fails, asyncio gives the connection up at once, with all that has come and was not read, such as a last
    verdict, a fault or the close frame.
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
        options["sock"] = await _opened(address, open_timeout)
    return await _Connect(address, proxy=proxy, open_timeout=open_timeout, **options)


@dataclass(frozen=True)
class Endpoint:
    """Where the verifier is. ``token`` is the bearer token; ``tls`` is used for ``wss`` addresses."""

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        """The WebSocket's address: a bare server address gets the session's path.

        Raises:
            ConnectError: not a ws, wss, http or https address.
        """
        try:
            parts = urlsplit(self.url if "://" in self.url else f"ws://{self.url}")
            scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
            (parts.hostname or "").encode("idna")
            known = scheme in {"ws", "wss"} and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of a port, an IPv6 address or a name that cannot be
            known = False
        if not known or any(char.isspace() for char in self.url):
            raise ConnectError(f"{self.url!r} is no verifier address: expected ws://HOST:PORT", final=True)
        path = parts.path if parts.path not in {"", "/"} else SESSION_PATH
        return f"{scheme}://{parts.netloc}{path}"

    @property
    def proxy(self) -> str | None:
        """The proxy that the environment, or the system, names for the address; None on this machine, to which no
        network leads."""
        parts = urlsplit(self.address)
        host, secure = parts.hostname or "", parts.scheme == "wss"
        if is_loopback(host) or proxy_bypass(f"{host}:{parts.port or (443 if secure else 80)}"):
            return None
        # The order of websockets, which leaves out `all`.
        names = ("wss", "socks", "https", "all") if secure else ("ws", "socks", "https", "http", "all")
        proxies = getproxies()
        name = next((name for name in names if proxies.get(name)), None)
        if name is None:
            return None
        # Systems name a SOCKS proxy without its version.
        return proxies[name].replace("http://", "socks5h://", 1) if name == "socks" else proxies[name]

    @property
    def context(self) -> ssl.SSLContext | None:
        """How to encrypt: ``tls``, or with the system's authorities; None for an address without encryption."""
        if not self.address.startswith("wss:"):
            return None
        return self.tls or ssl.create_default_context()


@dataclass(frozen=True)
class Timing:
    """Seconds. A link is given up after ``ping_interval + ping_timeout`` without an answer, and so is one on which no
    Welcome comes for ``welcome_timeout``."""

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
    attempt to connect, None when there will be none.
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
        """The verifier has answered the Hello of the connection that stands."""
        self._welcomed.set()

    def taken_up(self, frame: bytes) -> None:
        """Whoever got the frame is done with it."""
        self._waiting -= len(frame)
        self._room.set()

    def hold(self, held: bool) -> None:
        """Whether to make no new connection for now; one that stands stays."""
        self._wanted.clear() if held else self._wanted.set()

    def drop(self) -> None:
        """Have :meth:`run`, when it is cancelled next, not wait for the other end, which may be out of reach."""
        if self._socket is not None:
            self._socket.close_timeout = 0.0

    async def run(self) -> None:
        """Keep a connection open until cancelled. Returns only after a refusal that trying again cannot mend."""
        backoff = self._timing.first_backoff
        while True:
            if not self._wanted.is_set():
                self._handlers.held()
                await self._wanted.wait()
            self._handlers.connecting()
            try:
                async with await self._connect() as socket:
                    backoff = self._timing.first_backoff
                    await self._pump(socket)
                problem = ConnectError("the connection was closed", final=False)
            except ConnectError as error:
                problem = error
            self._handlers.closed(problem, None if problem.final else backoff)
            if problem.final:
                return
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._timing.longest_backoff)

    async def _connect(self) -> ClientConnection:
        address, proxy, timing = self._endpoint.address, self._endpoint.proxy, self._timing
        headers = {SESSION_ID_HEADER: self._session_id}
        if self._endpoint.token:
            headers["Authorization"] = f"Bearer {self._endpoint.token}"
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
            raise connect_error(address, error, timing.open_timeout, proxied=proxy is not None) from error

    async def _pump(self, socket: ClientConnection) -> None:
        """Move frames until the connection closes.

        Raises:
            ConnectError: no Welcome comes.
        """
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
                text = f"{self._endpoint.address} has not answered the Hello within {within:g} s"
                raise ConnectError(f"{text}: is it a moa-edge verifier?", final=False)
            for ended in (await asyncio.wait({writer, reader}, return_when=first))[0]:
                ended.result()  # raises a defect, which is no closed connection
            await reader  # after a write that failed: what came before is still to be read
        finally:
            self._socket = None
            for task in (writer, reader, welcome):
                task.cancel()
            await asyncio.gather(writer, reader, welcome, return_exceptions=True)

    async def _write(self, socket: ClientConnection) -> None:
        try:
            while True:
                frame = await self._outgoing.get()
                self.bytes_up += len(frame)
                with self._timeline.measure("send", "link", bytes=len(frame)):
                    await socket.send(frame)
        except ConnectionClosed:
            return

    async def _read(self, socket: ClientConnection) -> None:
        try:
            async for frame in socket:
                data = frame.encode() if isinstance(frame, str) else frame
                self.bytes_down += len(data)
                self._waiting += len(data)
                self._handlers.frame(data)
                while self._waiting > _MOST_WAITING_BYTES:
                    self._room.clear()
                    await self._room.wait()
        except ConnectionClosed:
            return


async def _opened(address: str, within_s: float) -> socket.socket:
    """A connection to the host of ``address``, at the first of its IP addresses that answers.

    Raises:
        OSError: none does; a TimeoutError after ``within_s`` seconds.
    """
    connecting = asyncio.ensure_future(_connected(address))
    try:
        if not (await asyncio.wait({connecting}, timeout=within_s))[0]:
            raise TimeoutError
        return connecting.result()
    finally:
        connecting.cancel()


async def _connected(address: str) -> socket.socket:
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
