"""The id of a conversation by which a proxy finds the verifier that has it."""

from __future__ import annotations

import re
import secrets

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
