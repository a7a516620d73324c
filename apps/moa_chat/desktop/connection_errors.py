"""What can be wrong with a connection."""

from __future__ import annotations

import enum

from moa_chat.desktop.certificates import Certificate
from moa_runtime.errors import MoaError


class Trouble(enum.Enum):
    """What the user can look at to mend a connection."""

    ADDRESS = "address"
    TOKEN = "token"
    CERTIFICATE = "certificate"
    BUNDLE = "bundle"
    AWAY = "away"  # nothing: the verifier does not answer now
    OTHER = "other"


class ConnectionFailedError(MoaError):
    """Why there is no connection.

    Attributes:
        trouble: which of the settings it is about.
        certificate: the one the server showed, where it is not trusted.
    """

    def __init__(self, text: str, trouble: Trouble, certificate: Certificate | None = None) -> None:
        super().__init__(text)
        self.trouble = trouble
        self.certificate = certificate
