"""The certificate of a verifier that no authority vouches for: to be looked at, and trusted on its own."""

from __future__ import annotations

import hashlib
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from moa_runtime.errors import MoaError

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
