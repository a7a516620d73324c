"""Connect as the settings say, and put what goes wrong into a sentence for the window.

``moa_chat.chat_config`` loads the whole runtime, so it is imported inside the functions that run in the runtime's
thread: the window is shown before.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import enum
import hashlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, Signal
from websockets.exceptions import InvalidHandshake, InvalidStatus, ProxyError

from moa_chat.desktop.profile import Settings
from moa_chat.desktop.programs import BundleExport, VerifierProcess
from moa_chat.desktop.runtime_thread import RuntimeThread
from moa_chat.strings import as_sentence
from moa_runtime.bundle import Bundle, BundleError
from moa_runtime.errors import MoaError
from moa_runtime.options import DrafterName
from moa_runtime.session.events import Policy
from moa_runtime.transport import ConnectError, Endpoint

if TYPE_CHECKING:
    from moa_runtime.chat import Chat

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Certificate:
    """A server's own certificate, as PEM text."""

    pem: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, as browsers and ``openssl x509 -fingerprint -sha256`` show it."""
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.pem)).hexdigest().upper()
        return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))

    def context(self) -> ssl.SSLContext:
        """Return a context that trusts only this certificate, whatever host name it was made for.

        Raises:
            MoaError: the text is no certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the user compared the fingerprint, which says more than a name
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # also one that some authority has signed
        try:
            context.load_verify_locations(cadata=self.pem)
        except (ssl.SSLError, ValueError) as error:
            raise MoaError("the trusted certificate in the settings is damaged: forget it and connect again") from error
        return context


def fetch_certificate(address: str) -> Certificate:
    """Fetch the certificate that the server at a ``wss`` address shows now; nothing is sent to it.

    Blocks for some seconds at most.

    Raises:
        MoaError: the server cannot be reached, or does not speak TLS.
    """
    parts = urlsplit(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    host = parts.hostname or ""
    try:
        with (
            socket.create_connection((host, parts.port or 443), _TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            shown = encrypted.getpeercert(binary_form=True)
    except OSError as error:
        raise MoaError(f"the certificate of {address} could not be read: {error}") from error
    if not shown:
        raise MoaError(f"{address} shows no certificate")
    return Certificate(ssl.DER_cert_to_PEM_cert(shown))


class Trouble(enum.Enum):
    """The setting that a user can change to repair a connection."""

    ADDRESS = "address"
    TOKEN = "token"
    CERTIFICATE = "certificate"
    BUNDLE = "bundle"
    AWAY = "away"  # nothing: the verifier does not answer now
    OTHER = "other"


class ConnectionFailedError(MoaError):
    """A connection that could not be made.

    Attributes:
        trouble: the setting that is at fault.
        certificate: the one that the server showed, if it is not trusted.
    """

    def __init__(self, text: str, trouble: Trouble, certificate: Certificate | None = None) -> None:
        super().__init__(text)
        self.trouble = trouble
        self.certificate = certificate


def endpoint_of(settings: Settings, options: argparse.Namespace) -> Endpoint:
    """Return where the settings say the verifier is; the command line may name an authority for its certificate.

    Raises:
        ConnectionFailedError: no address, a token that cannot be sent, or no such authority.
    """
    from moa_chat.chat_config import endpoint_for

    server, token = settings.server.strip(), settings.token.strip()
    if not server:
        raise ConnectionFailedError("Enter the verifier's address, such as wss://host:8765.", Trouble.ADDRESS)
    try:
        _ = Endpoint(server).address
    except MoaError as error:
        raise ConnectionFailedError(as_sentence(str(error)), Trouble.ADDRESS) from error
    try:
        endpoint = endpoint_for(server, token, None)
    except MoaError as error:
        raise ConnectionFailedError("The token may only hold visible ASCII characters.", Trouble.TOKEN) from error
    try:
        if settings.certificate:
            return dataclasses.replace(endpoint, tls=Certificate(settings.certificate).context())
        return endpoint_for(server, token, options.tls_ca)
    except MoaError as error:
        raise ConnectionFailedError(as_sentence(str(error)), Trouble.CERTIFICATE) from error


async def _load_bundle(folder: str, drafter: DrafterName | None) -> Bundle:
    """Open a bundle without blocking the event loop.

    Raises:
        ConnectionFailedError: there is none, it is damaged, or of another drafter.
    """
    from moa_chat.chat_config import open_bundle

    try:
        return await asyncio.to_thread(open_bundle, Path(folder) if folder else None, drafter)
    except MoaError as error:
        raise ConnectionFailedError(as_sentence(str(error)), Trouble.BUNDLE) from error


async def connect(
    settings: Settings, endpoint: Endpoint, options: argparse.Namespace, store: Path | None = None
) -> Chat:
    """Open a chat, even if the verifier is away: the chat connects later.

    Args:
        options: of the command line; they say how to draft.
        store: see :meth:`moa_runtime.chat.Chat.connect`.

    Raises:
        ConnectionFailedError: why a chat with these settings does not work.
    """
    from moa_chat.chat_config import chat_config_for

    bundle = await _load_bundle(settings.bundle, options.drafter)
    config = dataclasses.replace(
        chat_config_for(options, bundle, endpoint), policy=Policy.ASK, system=None, store=store
    )
    try:
        return await config.connect()
    except MoaError as error:
        problem = await explain(error, endpoint)
        if problem.trouble is not Trouble.AWAY:
            raise problem from error
    return await config.connect(wait=False)


async def try_connection(settings: Settings, options: argparse.Namespace) -> str:
    """Connect, disconnect, and return the target's name.

    Raises:
        ConnectionFailedError: why a chat with these settings does not work now.
    """
    from moa_chat.chat_config import chat_config_for

    endpoint = endpoint_of(settings, options)
    bundle = await _load_bundle(settings.bundle, options.drafter)
    try:
        chat = await chat_config_for(options, bundle, endpoint).connect()
    except MoaError as error:
        raise await explain(error, endpoint) from error
    await chat.close()
    return bundle.manifest.target


async def explain(error: MoaError, endpoint: Endpoint) -> ConnectionFailedError:
    """Return the reason as a sentence for the window, with the certificate if it is one that is not trusted."""
    if isinstance(error, ConnectionFailedError):
        return error
    cause, address = error.__cause__, endpoint.address
    if isinstance(cause, InvalidStatus) and cause.response.status_code in (401, 403):
        return ConnectionFailedError(
            f"The verifier at {address} refused the token. Ask whoever runs it for the right one.", Trouble.TOKEN
        )
    if isinstance(cause, ssl.SSLCertVerificationError):
        return await _explain_certificate(cause, endpoint)
    if isinstance(cause, ssl.SSLError):
        return ConnectionFailedError(
            f"{address} does not speak TLS. Use ws:// for a verifier without encryption.", Trouble.ADDRESS
        )
    if isinstance(cause, InvalidHandshake) and not isinstance(cause, ProxyError):
        return ConnectionFailedError(f"There is no moa-edge verifier at {address}.", Trouble.ADDRESS)
    if isinstance(error, ConnectError) and not error.final:
        text = f"No verifier answers at {address}. Check the address, or try later."
        return ConnectionFailedError(as_sentence(str(error)) if endpoint.proxy else text, Trouble.AWAY)
    if isinstance(error, BundleError):
        return ConnectionFailedError(as_sentence(str(error)), Trouble.BUNDLE)
    if str(error).startswith("the bundle was made for"):
        return ConnectionFailedError(f"The bundle does not fit the verifier: {error}.", Trouble.BUNDLE)
    return ConnectionFailedError(as_sentence(str(error)), Trouble.OTHER)


async def _explain_certificate(cause: ssl.SSLCertVerificationError, endpoint: Endpoint) -> ConnectionFailedError:
    if endpoint.tls is not None:
        text = f"{endpoint.address} shows another certificate than the one you trust, or that one has expired."
    else:
        text = f"No authority vouches for the certificate of {endpoint.address} ({cause.verify_message})."
    try:
        certificate = await asyncio.to_thread(fetch_certificate, endpoint.address)
    except MoaError:
        certificate = None
    return ConnectionFailedError(text, Trouble.CERTIFICATE, certificate)


class Connector(QObject):
    """Connects the runtime as the settings say; starts the verifier of this machine if they ask for one.

    Attributes:
        export: of the bundle that is used if the settings name none.

    Signals:
        connecting: the name of the verifier.
        starting: whether the verifier of this machine is being started; :meth:`cancel` ends that.
        connected: the name of the verifier; there is a chat now, though the verifier itself may still be away.
        failed: a MoaError; mostly a :class:`ConnectionFailedError`.
    """

    connecting = Signal(str)
    starting = Signal(bool)
    connected = Signal(str)
    failed = Signal(object)

    def __init__(self, runtime: RuntimeThread, options: argparse.Namespace, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._runtime, self._options = runtime, options
        self._settings = Settings()
        self._verifier = VerifierProcess(options.drafter, self)
        self._verifier.ready.connect(self._started)
        self._verifier.failed.connect(self.failed)
        self.export = BundleExport(options.drafter, self)

    def connect_as(self, settings: Settings) -> None:
        """Begin to connect; a signal reports the outcome."""
        self._settings = settings
        if settings.local:
            self.connecting.emit("a verifier on this machine")
            try:
                self._verifier.start()
            except MoaError as error:
                self.failed.emit(error)
            else:
                self.starting.emit(True)
            return
        self._verifier.stop()
        self.connecting.emit(settings.server)
        self._runtime.run(self._find_endpoint(settings), self._connect_to, self.failed.emit)

    def cancel(self) -> None:
        """Stop starting the verifier of this machine."""
        self._verifier.stop()
        self.failed.emit(MoaError("The verifier on this machine was not started"))

    def test(self, settings: Settings, succeeded: Callable[[str], None], failed: Callable[[MoaError], None]) -> None:
        """Connect with these settings beside the chat that runs; ``succeeded`` gets the target's name."""
        self._runtime.run(try_connection(settings, self._options), succeeded, failed)

    def close(self) -> None:
        """End the programs that were started."""
        self._verifier.stop()
        self.export.stop()

    async def _find_endpoint(self, settings: Settings) -> Endpoint:
        return endpoint_of(settings, self._options)

    def _started(self, endpoint: Endpoint) -> None:
        self.starting.emit(False)
        self._connect_to(endpoint)

    def _connect_to(self, endpoint: Endpoint) -> None:
        settings, options = self._settings, self._options
        where = "a verifier on this machine" if settings.local else endpoint.address
        self._runtime.connect_chat(
            lambda store: connect(settings, endpoint, options, store),
            endpoint.address,
            lambda: self.connected.emit(where),
            self.failed.emit,
        )
