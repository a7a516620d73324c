"""What a WebSocket's client says by subprotocols: what it speaks, and the token of a page, which can set no header."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from moa_runtime.errors import MoaError

#: The name of the messages' package. Versions are settled by the Hello, whose fault says what to do.
SESSION_SUBPROTOCOL = "moa.v1"
_BEARER = "moa.bearer."
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")


class SubprotocolError(MoaError):
    """Subprotocols that say nothing clear. The message repeats nothing of them, for a part may be a token."""


def authorization_of(header: str | None, offered: Sequence[str]) -> str | None:
    """What an upgrade request gives as its ``Authorization``: the header, or the same made of a subprotocol.

    Args:
        header: None without one.
        offered: the subprotocols; the token is ``moa.bearer.`` and base64url of its UTF-8, without padding.

    Raises:
        SubprotocolError: a token that cannot be read, more than one, or one without :data:`SESSION_SUBPROTOCOL`.
    """
    tokens = [name.removeprefix(_BEARER) for name in offered if name.startswith(_BEARER)]
    if not tokens:
        return header
    if len(tokens) > 1 or header is not None:
        raise SubprotocolError("a request carries its bearer token once, as a header or as one subprotocol")
    if SESSION_SUBPROTOCOL not in offered:
        # A browser drops a connection whose server picks nothing that was offered, and a token is never sent back.
        raise SubprotocolError(f"a bearer token among the subprotocols needs {SESSION_SUBPROTOCOL} beside it")
    return f"Bearer {_decoded(tokens[0])}"


def _decoded(text: str) -> str:
    try:
        if not _BASE64URL.fullmatch(text):
            raise ValueError
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (ValueError, binascii.Error):
        # Without the cause, which would be in tracebacks.
        raise SubprotocolError(
            f"the subprotocol {_BEARER}... must end in base64url of the token's UTF-8, without padding"
        ) from None
