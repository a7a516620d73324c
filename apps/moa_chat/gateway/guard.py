"""Who may use the endpoint: hosts, origins of web pages, the bearer token."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moa_chat.gateway.errors import ApiError
from moa_runtime.access import bearer_matches, origin_allowed

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Guard:
    """Refuses requests before they reach the app.

    A page whose server answers for its own name with this machine's address (DNS rebinding) gives itself away in
    ``Host``, also in requests that name no ``Origin``.

    Args:
        token: that requests must carry; empty for none.
        origins: of web pages that may send requests; ``*`` for all.
        hosts: names under which the endpoint may be reached; None for any.
    """

    def __init__(self, app: ASGIApp, *, token: str, origins: Collection[str], hosts: Collection[str] | None) -> None:
        self._app, self._token, self._origins, self._hosts = app, token, origins, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = _name_of(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            return ApiError(403, f"the host {host!r} is none of this endpoint's names", code="host_not_allowed")
        origin = headers.get("origin")
        if not origin_allowed(origin, self._origins):
            text = f"web pages of {origin} may not use this endpoint; --allow-origin {origin} would let them"
            return ApiError(403, text, code="origin_not_allowed")
        # A browser asks without the token whether it may send a request with it.
        asks_first = scope["method"] == "OPTIONS" and origin is not None
        if asks_first or bearer_matches(headers.get("authorization", ""), self._token):
            return None
        challenge = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key", headers=challenge)


def _name_of(host: str) -> str:
    """A Host header without its port: ``localhost:80`` is ``localhost``, ``[::1]:80`` is ``[::1]``."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
