"""Addresses of verifiers, as people type them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urljoin, urlsplit

SESSION_PATH = "/v1/session"
_SECURE = {"ws": False, "http": False, "wss": True, "https": True}
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
#: Blanks, control characters, and a sign that some parsers take for a slash.
_NEVER = re.compile(r"[\s\x00-\x1f\x7f\\]")
_UNQUOTED = "/%:@!$&'()*+,;=~[]|^"


@dataclass(frozen=True)
class Address:
    """The address of a verifier, perhaps below a path of a proxy. TypeScript has the same by the same vectors.

    Attributes:
        host: in lower case, with the brackets of an IPv6 address, and with a port if it is not the scheme's own.
        prefix: path of the verifier's root, without a slash at its end; empty for that of the host.
    """

    secure: bool
    host: str
    prefix: str

    @classmethod
    def parse(cls, text: str, scheme: str = "ws") -> Address:
        """Read an address with one of the schemes ws, wss, http and https, or with none, which means ``scheme``. A path
        is the proxy's, or that of the session's WebSocket; query and fragment are left out. Raises ValueError."""
        given, separator, rest = text.partition("://")
        if not separator:
            given, rest = scheme, text
        if given.lower() not in _SECURE or not rest or rest[0] in "/?#" or _NEVER.search(rest):
            raise ValueError(f"{text!r} is no address")
        secure, parts = _SECURE[given.lower()], urlsplit(f"http://{rest}")
        if "@" in parts.netloc or parts.port == 0:
            raise ValueError(f"{text!r} is no address")
        host = _host(parts.hostname or "")
        if parts.port not in (None, 443 if secure else 80):
            host += f":{parts.port}"
        path = quote(urljoin("http://host/", parts.path or "/").removeprefix("http://host"), safe=_UNQUOTED)
        return cls(secure, host, path.rstrip("/").removesuffix(SESSION_PATH).rstrip("/"))

    @property
    def session(self) -> str:
        """URL of the session's WebSocket."""
        return f"{'wss' if self.secure else 'ws'}://{self.host}{self.prefix}{SESSION_PATH}"

    def at(self, path: str) -> str:
        """Return the URL of another of the verifier's resources, such as ``/v1/status``."""
        return f"{'https' if self.secure else 'http'}://{self.host}{self.prefix}{path}"


def split_link(text: str) -> tuple[str, str]:
    """Return address and token of a link such as ``moa-serve --web`` shows: the token, which may be empty, follows
    ``#token=``."""
    address, _, fragment = text.partition("#")
    return address, unquote(fragment.removeprefix("token=")) if fragment.startswith("token=") else ""


def _host(name: str) -> str:
    if ":" in name:
        return f"[{ipaddress.IPv6Address(name).compressed}]"
    name = name.encode("idna").decode()
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a host")
    return name
