"""Bearer-token authentication (RFC 6750): one token from the command line, any number from a file."""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import logging
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from moa_runtime.checked_file import read_checked
from moa_runtime.errors import MoaError, reason_of
from moa_server.edge.rate_limits import Budget, Budgets, Clock

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # it appears in logs
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_BUDGETS = tuple(each.name for each in fields(Budget))


class TokenFileError(MoaError):
    """A token file that cannot be used."""


@dataclass(frozen=True)
class Bearer:
    """The owner of a token, authenticated by a request."""

    name: str = ""  # of the entry in the token file; empty for the single token, and if no token is required
    budget: Budget = field(default_factory=Budget)  # its rate limits
    sha256: str = field(default="", repr=False)  # hex of its token's hash; empty if no token is required


class Authenticator:
    """Authenticates requests by bearer token, and keeps the usage of each bearer.

    Tokens are random, 256 bits, so one SHA-256 is enough: slow and salted hashes protect against dictionary attacks,
    which are hopeless here.

    Args:
        token: one without a name or a budget, unless the file has an entry for it; empty for none.
        file: token file, see :func:`read_tokens`; None for none. A file without entries rejects all requests.
        clock: of the rate limits.

    Raises:
        TokenFileError: the file cannot be used.
    """

    def __init__(self, token: str = "", file: Path | None = None, clock: Clock = time.monotonic) -> None:
        self._own = [Bearer(sha256=digest(token))] if token else []
        self._file, self._clock = file, clock
        self._named = read_tokens(file) if file else []
        self._budgets: dict[str, Budgets] = {}
        self._watches: dict[object, tuple[Bearer, Callable[[], None]]] = {}

    @property
    def open(self) -> bool:
        """Whether no token is required."""
        return not self._own and self._file is None

    def authenticate(self, authorization: str | None) -> Bearer | None:
        """Return the bearer of an ``Authorization`` header; None if its token is missing or unknown."""
        if self.open:
            return Bearer()
        scheme, _, token = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        presented = digest(token.strip())
        # All entries, each in constant time: the time does not tell which entry it was.
        found = [bearer for bearer in self._all() if hmac.compare_digest(bearer.sha256, presented)]
        return found[0] if found else None

    def valid(self, bearer: Bearer) -> bool:
        """Whether an authenticated bearer still is valid: a reload may have removed or changed its token."""
        return self.open or any(each.name == bearer.name and each.sha256 == bearer.sha256 for each in self._all())

    def watch(self, bearer: Bearer, withdrawn: Callable[[], None]) -> Callable[[], object]:
        """Call ``withdrawn`` when a reload withdraws the bearer's token, or now if one has. Long-running work has a
        watch.

        Returns:
            a function that ends the watch; calling it again does nothing.
        """
        key = object()
        self._watches[key] = bearer, withdrawn
        if not self.valid(bearer):
            withdrawn()
        return functools.partial(self._watches.pop, key, None)

    def budgets(self, bearer: Bearer) -> Budgets:
        """Return the usage of a bearer: one object for each name, kept across :meth:`reload`."""
        if bearer.name not in self._budgets:
            self._budgets[bearer.name] = Budgets(bearer.budget, self._clock)
        return self._budgets[bearer.name]

    def most_sessions(self, bearer: Bearer, places: int) -> int | None:
        """Return how many of all places for sessions a bearer may take, None for any number: without a limit of its
        own three quarters if there are other tokens, so that none holds them all."""
        limit = self.budgets(bearer).budget.sessions
        if limit is not None:
            return limit
        return max(1, places - max(1, places // 4)) if len(self._all()) > 1 else None

    def reload(self) -> None:
        """Read the file again, and end the work of withdrawn tokens. An invalid file is logged and leaves the tokens
        as they are."""
        if self._file is None:
            return
        try:
            self._named = read_tokens(self._file)
        except TokenFileError as error:
            _log.warning("the tokens stay as they were: %s", error)
            return
        for bearer in self._named:
            used = self._budgets.get(bearer.name)
            if used is not None and used.budget != bearer.budget:
                used.change(bearer.budget)
        kept = {bearer.name for bearer in self._all()}
        # The sessions of a removed name are about to end, with the object they hold.
        self._budgets = {name: used for name, used in self._budgets.items() if name in kept or used.sessions}
        _log.info("read %s again: %d tokens", self._file, len(self._named))
        for bearer, withdrawn in list(self._watches.values()):
            if not self.valid(bearer):
                withdrawn()

    def _all(self) -> list[Bearer]:
        return self._named + self._own  # an entry of the file takes precedence for the same token


def digest(token: str) -> str:
    """Return the hex SHA-256 of a token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def random_token(size: int = 32) -> str:
    """Make a token of ``size`` random bytes. No program reads it as an option: it does not begin with a hyphen."""
    while (token := secrets.token_urlsafe(size)).startswith("-"):
        pass
    return token


def new_token(name: str) -> tuple[str, str]:
    """Make a token, stored nowhere, and the JSON of its entry for the token file.

    Raises:
        TokenFileError: ``name`` is invalid.
    """
    _check_name(name)
    token = random_token()
    return token, json.dumps({"name": name, "sha256": digest(token)})


def read_tokens(file: Path) -> list[Bearer]:
    """Read the bearers of a token file.

    The file is ``{"tokens": [{"name": "alice", "sha256": "<hex of the token's hash>", ...}]}``; an entry may have any
    field of :class:`Budget` besides. It holds no secret, so others may read it; anyone with write access could add a
    token, so a file that others may write is logged as a warning.

    Raises:
        TokenFileError: the file is unreadable or invalid; the message names file, entry and error.
    """
    try:
        raw = json.loads(read_checked(file))
        mode = file.stat().st_mode
    except OSError as error:
        text = f"cannot read the token file {file}: {reason_of(error)}"
        raise TokenFileError(text, code="unreadable") from error
    except (ValueError, RecursionError) as error:
        raise TokenFileError(f"the token file {file} is no JSON: {error}", code="not_json") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        _log.warning("others may write the token file %s, and so let themselves in; chmod go-w %s", file, file)
    if not isinstance(raw, dict) or raw.keys() != {"tokens"} or not isinstance(raw["tokens"], list):
        raise TokenFileError(f'the token file {file} must be one JSON object {{"tokens": [...]}}', code="bad_shape")
    if not raw["tokens"]:
        _log.warning("the token file %s has no entry: every request is refused", file)
    bearers: list[Bearer] = []
    for number, entry in enumerate(raw["tokens"], 1):
        try:
            bearer = _bearer(entry)
            for what in ("name", "sha256"):
                if any(getattr(other, what) == getattr(bearer, what) for other in bearers):
                    text = f"its {what} is that of an entry before; each needs its own"
                    raise TokenFileError(text, code="duplicate")
        except TokenFileError as error:
            name = entry.get("name") if isinstance(entry, dict) else None
            called = f" ({name!r})" if isinstance(name, str) else ""
            text = f"the token file {file}, entry {number}{called}: {error}"
            raise TokenFileError(text, code=error.code) from None
        bearers.append(bearer)
    return bearers


def _bearer(entry: object) -> Bearer:
    if not isinstance(entry, dict):
        raise TokenFileError('expected an object such as {"name": "alice", "sha256": "..."}', code="bad_shape")
    known = ("name", "sha256", *_BUDGETS)
    if unknown := sorted(entry.keys() - set(known)):
        raise TokenFileError(f"unknown key {unknown[0]!r}; known are {', '.join(known)}", code="unknown_key")
    name, sha256 = entry.get("name"), entry.get("sha256")
    _check_name(name)
    if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
        text = f"sha256 must be the 64 hex digits of the token's SHA-256; moa-serve --new-token {name} makes an entry"
        raise TokenFileError(text, code="bad_digest")
    budget = Budget(**{key: _amount(key, entry[key]) for key in _BUDGETS if key in entry})
    return Bearer(str(name), budget, sha256.lower())


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = f"name must be 1 to 64 letters, digits, dots, dashes, underscores or @, not {name!r}"
        raise TokenFileError(text, code="bad_name")


def _amount(key: str, value: Any) -> Any:
    whole = key == "sessions"
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if number and 0 < value <= sys.float_info.max:  # whole numbers of JSON may be larger
        return value
    expected = "a whole number from 1 on" if whole else "a number above 0"
    text = f"{key} must be {expected}, not {value!r}; leave it out for no limit"
    raise TokenFileError(text, code="out_of_range")


#: Subprotocol of sessions: the package name of the messages. The Hello negotiates versions.
SESSION_SUBPROTOCOL = "moa.v1"
_BEARER = "moa.bearer."
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")


class SubprotocolError(MoaError):
    """Invalid subprotocols of an upgrade request. The message does not repeat them, because one may be a token."""


def authorization_of(header: str | None, offered: Sequence[str]) -> str | None:
    """Return the ``Authorization`` of an upgrade request: its header, or the equivalent of its token subprotocol, which
    browsers use because they cannot set headers.

    Args:
        header: the ``Authorization`` header; None without one.
        offered: the subprotocols; a token is ``moa.bearer.`` followed by base64url of its UTF-8, without padding.

    Raises:
        SubprotocolError: a token is unreadable, given twice, or given without :data:`SESSION_SUBPROTOCOL`.
    """
    tokens = [name.removeprefix(_BEARER) for name in offered if name.startswith(_BEARER)]
    if not tokens:
        return header
    if len(tokens) > 1 or header is not None:
        text = "a request carries its bearer token once, as a header or as one subprotocol"
        raise SubprotocolError(text, code="token_repeated")
    if SESSION_SUBPROTOCOL not in offered:
        # A browser drops a connection whose server picks nothing that was offered, and a token is never sent back.
        text = f"a bearer token among the subprotocols needs {SESSION_SUBPROTOCOL} beside it"
        raise SubprotocolError(text, code="subprotocol_missing")
    try:
        if not _BASE64URL.fullmatch(tokens[0]):
            raise ValueError
        return f"Bearer {base64.urlsafe_b64decode(tokens[0] + '=' * (-len(tokens[0]) % 4)).decode()}"
    except ValueError:
        # Without the cause, which would be in tracebacks.
        text = f"the subprotocol {_BEARER}... must end in base64url of the token's UTF-8, without padding"
        raise SubprotocolError(text, code="not_base64url") from None
