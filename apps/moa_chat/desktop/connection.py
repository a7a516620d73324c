"""From settings to a connection, and from what goes wrong to a sentence for the window. Imports the runtime."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import ssl
from pathlib import Path

from websockets.exceptions import InvalidHandshake, InvalidStatus, ProxyError

from moa_chat.chat_config import endpoint_for, open_bundle, setup_for
from moa_chat.desktop.certificates import Certificate, fetch_certificate
from moa_chat.desktop.connection_errors import ConnectionFailedError, Trouble
from moa_chat.desktop.profile import Settings
from moa_chat.strings import as_sentence
from moa_runtime.bundle import Bundle, BundleError
from moa_runtime.chat import Chat
from moa_runtime.connect_error import ConnectError
from moa_runtime.errors import MoaError
from moa_runtime.options import DrafterName
from moa_runtime.session.events import Policy
from moa_runtime.transport import Endpoint


def endpoint_of(settings: Settings, options: argparse.Namespace) -> Endpoint:
    """Where the settings say the verifier is; the command line may name an authority for its certificate.

    Raises:
        ConnectionFailedError: no address, a token that cannot be sent, or no such authority.
    """
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
    """Open a bundle without keeping the event loop from its connections.

    Raises:
        ConnectionFailedError: there is none, it is damaged, or of another drafter.
    """
    try:
        return await asyncio.to_thread(open_bundle, Path(folder) if folder else None, drafter)
    except MoaError as error:
        raise ConnectionFailedError(as_sentence(str(error)), Trouble.BUNDLE) from error


async def connect(
    settings: Settings, endpoint: Endpoint, options: argparse.Namespace, store: Path | None = None
) -> Chat:
    """Open a chat, also where the verifier is away: it connects when it can.

    Args:
        options: of the command line; they say how to draft.
        store: see :meth:`moa_runtime.chat.Chat.connect`.

    Raises:
        ConnectionFailedError: why a chat with these settings does not work.
    """
    bundle = await _load_bundle(settings.bundle, options.drafter)
    setup = dataclasses.replace(setup_for(options, bundle, endpoint), policy=Policy.ASK, system=None, store=store)
    try:
        return await setup.connect()
    except MoaError as error:
        problem = await explain(error, endpoint)
        if problem.trouble is not Trouble.AWAY:
            raise problem from error
    return await setup.connect(wait=False)


async def try_connection(settings: Settings, options: argparse.Namespace) -> str:
    """Connect and leave again; returns the target's name.

    Raises:
        ConnectionFailedError: why a chat with these settings does not work now.
    """
    endpoint = endpoint_of(settings, options)
    bundle = await _load_bundle(settings.bundle, options.drafter)
    try:
        chat = await setup_for(options, bundle, endpoint).connect()
    except MoaError as error:
        raise await explain(error, endpoint) from error
    await chat.close()
    return bundle.manifest.target


async def explain(error: MoaError, endpoint: Endpoint) -> ConnectionFailedError:
    """The reason in the words of the window; for a certificate that is not trusted, with that certificate."""
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
