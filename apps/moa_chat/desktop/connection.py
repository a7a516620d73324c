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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, Signal
from websockets.exceptions import InvalidHandshake, InvalidStatus, ProxyError

from moa_chat import strings
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.programs import BundleExport, VerifierProcess
from moa_chat.desktop.runtime_thread import RuntimeThread
from moa_chat.strings import as_sentence
from moa_runtime.errors import MoaError
from moa_runtime.manifest import BundleError
from moa_runtime.session.events import Policy
from moa_runtime.transport import ConnectError, Endpoint

if TYPE_CHECKING:
    from moa_chat.chat_config import ChatConfig
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
        """Return a context that trusts only this certificate. Raises MoaError if the text is no certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the user compared the fingerprint, which says more than a name
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # also one that some authority has signed
        try:
            context.load_verify_locations(cadata=self.pem)
        except (ssl.SSLError, ValueError) as error:
            text = "the trusted certificate in the settings is damaged: forget it and connect again"
            raise MoaError(text, code="damaged") from error
        return context


def fetch_certificate(address: str) -> Certificate:
    """Fetch the certificate that a server shows now, in some seconds at most. Raises MoaError if it shows none."""
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
        text = f"the certificate of {address} could not be read: {error}"
        raise MoaError(text, code="certificate_unreadable") from error
    if not shown:
        raise MoaError(f"{address} sent no certificate", code="no_certificate")
    return Certificate(ssl.DER_cert_to_PEM_cert(shown))


class Trouble(enum.Enum):
    """The setting that a user can change to repair a connection."""

    ADDRESS = "address"
    TOKEN = "token"
    CERTIFICATE = "certificate"
    BUNDLE = "bundle"
    AWAY = "away"  # nothing: the verifier does not answer now
    OTHER = "other"


#: Settings at fault by the code of the error.
_TROUBLES = {
    "unauthorized": Trouble.TOKEN,
    "forbidden": Trouble.ADDRESS,
    "host_refused": Trouble.ADDRESS,
    "unreachable": Trouble.AWAY,
    "malformed": Trouble.ADDRESS,
    "http_status": Trouble.ADDRESS,
    "redirect": Trouble.ADDRESS,
    "needs_tls": Trouble.ADDRESS,
}


class ConnectionFailedError(MoaError):
    """A connection that could not be made: the setting at fault, and a certificate that is not trusted."""

    def __init__(
        self, text: str, trouble: Trouble, certificate: Certificate | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(text, code=code)
        self.trouble, self.certificate = trouble, certificate


def _failed(error: MoaError, trouble: Trouble) -> ConnectionFailedError:
    """Return an error of the runtime as one for the window."""
    return ConnectionFailedError(as_sentence(str(error)), trouble, code=error.code)


def endpoint_of(settings: Settings, options: argparse.Namespace) -> Endpoint:
    """Return where the settings say the verifier is. Raises ConnectionFailedError if a setting cannot be used."""
    from moa_chat.chat_config import endpoint_for

    server, token = settings.server.strip(), settings.token.strip()
    trouble = Trouble.ADDRESS
    try:
        if not server:
            raise MoaError("enter the server's address, such as wss://host:8765", code="address_missing")
        _ = Endpoint(server).address
        trouble = Trouble.TOKEN
        endpoint = endpoint_for(server, token, None)
        trouble = Trouble.CERTIFICATE
        if settings.certificate:
            return dataclasses.replace(endpoint, tls=Certificate(settings.certificate).context())
        return endpoint_for(server, token, options.tls_ca)
    except MoaError as error:
        if trouble is Trouble.TOKEN:  # without the names of options
            text = "The token may contain only visible ASCII characters."
            raise ConnectionFailedError(text, trouble, code="not_ascii") from error
        raise _failed(error, trouble) from error


async def _config(
    settings: Settings, endpoint: Endpoint, options: argparse.Namespace, progress: Callable[[int, int], None]
) -> ChatConfig:
    """Open or fetch the bundle, without blocking the event loop, and return a chat's configuration with it."""
    from moa_chat.chat_config import chat_config_for, open_bundle
    from moa_chat.server_bundle import bundle_for_server

    folder = Path(settings.bundle) if settings.bundle else None
    if settings.local:
        opening = partial(open_bundle, folder, options.drafter)
    else:
        opening = partial(bundle_for_server, endpoint, folder, options.drafter, writer=True, progress=progress)
    try:
        return chat_config_for(options, await asyncio.to_thread(opening), endpoint)
    except ConnectionFailedError:
        raise
    except MoaError as error:
        if error.code in ("untrusted_certificate", "no_tls"):
            raise await explain(error, endpoint) from error
        raise _failed(error, _TROUBLES.get(error.code or "", Trouble.BUNDLE)) from error


def _without_progress(received: int, total: int) -> None:
    """Show nothing of a download."""


async def connect(
    settings: Settings,
    endpoint: Endpoint,
    options: argparse.Namespace,
    store: Path | None = None,
    progress: Callable[[int, int], None] = _without_progress,
) -> Chat:
    """Open a chat, which connects later if the verifier is away. Raises ConnectionFailedError if it cannot work.

    Args:
        progress: called in another thread with the bytes of the bundle that are here, and with all.
    """
    config = await _config(settings, endpoint, options, progress)
    config = dataclasses.replace(config, policy=Policy.ASK, system=None, store=store)
    try:
        return await config.connect()
    except MoaError as error:
        problem = await explain(error, endpoint)
        if problem.trouble is not Trouble.AWAY:
            raise problem from error
    return await config.connect(wait=False)


async def try_connection(settings: Settings, options: argparse.Namespace) -> str:
    """Connect, disconnect, and return the target's name. Raises ConnectionFailedError if that fails."""
    endpoint = endpoint_of(settings, options)
    config = await _config(settings, endpoint, options, _without_progress)
    try:
        chat = await config.connect()
    except MoaError as error:
        raise await explain(error, endpoint) from error
    await chat.close()
    return config.target


async def explain(error: MoaError, endpoint: Endpoint) -> ConnectionFailedError:
    """Return the reason as a sentence for the window, with the certificate if it is one that is not trusted."""
    if isinstance(error, ConnectionFailedError):
        return error
    cause, address = error.__cause__, endpoint.address
    if isinstance(cause, InvalidStatus) and error.code in _TROUBLES:
        return _failed(error, _TROUBLES[error.code])
    if isinstance(cause, ssl.SSLCertVerificationError):
        return await _explain_certificate(cause, endpoint, error.code)
    if isinstance(cause, ssl.SSLError):
        text = f"{address} does not speak TLS. Use ws:// for a server without encryption."
        return ConnectionFailedError(text, Trouble.ADDRESS, code=error.code)
    if isinstance(cause, InvalidHandshake) and not isinstance(cause, ProxyError):
        return ConnectionFailedError(f"There is no moa-edge server at {address}.", Trouble.ADDRESS, code=error.code)
    if isinstance(error, ConnectError) and not error.final:
        if endpoint.proxy:
            return _failed(error, Trouble.AWAY)
        text = f"No server answers at {address}. Check the address, or try later."
        return ConnectionFailedError(text, Trouble.AWAY, code=error.code)
    if error.code == "fingerprint_mismatch":
        text = as_sentence(f"the small model does not fit the server: {error}")
        return ConnectionFailedError(text, Trouble.BUNDLE, code="other_bundle")
    return _failed(error, Trouble.BUNDLE if isinstance(error, BundleError) else Trouble.OTHER)


async def _explain_certificate(
    cause: ssl.SSLCertVerificationError, endpoint: Endpoint, code: str | None
) -> ConnectionFailedError:
    if endpoint.tls is not None:
        text = f"{endpoint.address} has a certificate that you do not trust, or that has expired."
    else:
        text = f"Cannot verify the certificate of {endpoint.address} ({cause.verify_message})."
    try:
        certificate = await asyncio.to_thread(fetch_certificate, endpoint.address)
    except MoaError:
        certificate = None
    return ConnectionFailedError(text, Trouble.CERTIFICATE, certificate, code=code)


class Connector(QObject):
    """Connects the runtime as the settings say; starts the verifier of this machine if they ask for one."""

    connecting = Signal(str)  # the name of the verifier
    preparing = Signal(str, float)  # what is done to make the bundle, and how much of it; :meth:`cancel` ends that
    starting = Signal(bool)  # whether the verifier of this machine is being started; :meth:`cancel` ends that
    fetching = Signal(float, float)  # bytes of the verifier's bundle that are here, and all; :meth:`cancel` ends that
    connected = Signal(str)  # the name of the verifier, which may still be away; there is a chat now
    failed = Signal(object)  # a MoaError; mostly a :class:`ConnectionFailedError`

    def __init__(self, runtime: RuntimeThread, options: argparse.Namespace, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._runtime, self._options = runtime, options
        self._settings, self._cancelled = Settings(), False
        self._verifier = VerifierProcess(options.drafter, self)
        self._verifier.ready.connect(self._started)
        self._verifier.failed.connect(self.failed)
        self.export = BundleExport(options.drafter, self)  # of the bundle that is used if the settings name none
        self.export.progressed.connect(self.preparing)
        self.export.ended.connect(lambda error: self.failed.emit(error) if error else self._start())

    def connect_as(self, settings: Settings) -> None:
        """Begin to connect; a signal reports the outcome."""
        self._settings, self._cancelled = settings, False
        if settings.local:
            self.connecting.emit(strings.LOCAL_SERVER)
            try:
                if settings.bundle or self.export.present:
                    self._start()
                else:
                    self.export.start()
                    self.preparing.emit(strings.FIRST_STAGE, 0.0)
            except MoaError as error:
                self.failed.emit(error)
            return
        self._verifier.stop()
        self.connecting.emit(settings.server)
        endpoint = asyncio.to_thread(endpoint_of, settings, self._options)
        self._runtime.run(endpoint, self._connect_to, self.failed.emit)

    def cancel(self) -> None:
        """Stop preparing and starting the verifier of this machine, or fetching the bundle of another. Fetched
        bytes are kept."""
        if self._settings.local:
            self.export.stop()
            self._verifier.stop()
            self.failed.emit(MoaError("Cancelled. A fetched model is kept.", code="not_started"))
        else:
            self._cancelled = True

    def _fetched(self, received: int, total: int) -> None:
        if self._cancelled:
            raise ConnectionFailedError("Cancelled. The data is kept.", Trouble.OTHER, code="cancelled")
        self.fetching.emit(received, total)

    def test(self, settings: Settings, succeeded: Callable[[str], None], failed: Callable[[MoaError], None]) -> None:
        """Connect with these settings beside the chat that runs; ``succeeded`` gets the target's name."""
        self._runtime.run(try_connection(settings, self._options), succeeded, failed)

    def close(self) -> None:
        """End the programs that were started."""
        self._verifier.stop()
        self.export.stop()

    def _start(self) -> None:
        """Start the verifier of this machine."""
        bundle = self._settings.bundle
        try:
            self._verifier.start(Path(bundle) if bundle else None)
        except MoaError as error:
            self.failed.emit(error)
        else:
            self.starting.emit(True)

    def _started(self, endpoint: Endpoint) -> None:
        self.starting.emit(False)
        self._connect_to(endpoint)

    def _connect_to(self, endpoint: Endpoint) -> None:
        settings, options = self._settings, self._options
        where = strings.LOCAL_SERVER if settings.local else endpoint.address
        self._runtime.connect_chat(
            lambda store: connect(settings, endpoint, options, store, self._fetched),
            endpoint.address,
            lambda: self.connected.emit(where),
            self.failed.emit,
        )
