"""Who may use what our programs listen on: web pages by their origin, everybody by a bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Collection


def origin_allowed(origin: str | None, allowed: Collection[str]) -> bool:
    """Whether a request with this ``Origin`` header may be answered.

    Any web page that somebody opens can send requests to his own machine, WebSockets included; its browser names the
    page in ``Origin``, also where the page's server passes the machine's address off as its own (DNS rebinding).

    Args:
        origin: None without the header: not from a web page.
        allowed: origins such as ``http://localhost:3000``; ``*`` is all of them.
    """
    return origin is None or not {origin, "*"}.isdisjoint(allowed)


def bearer_matches(authorization: str, token: str) -> bool:
    """Whether an ``Authorization`` header carries ``token``, compared in constant time; an empty one asks for none."""
    return not token or hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())
