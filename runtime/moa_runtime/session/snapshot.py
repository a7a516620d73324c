"""Snapshots of a client session as JSON: saved by one process, restored by the next."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeGuard, TypeVar

from moa_runtime.bundle import Fingerprints
from moa_runtime.errors import MoaError
from moa_runtime.session.events import LARGEST_REAL, Origin, Policy, Sampling
from moa_runtime.session.handshake import Limits

SNAPSHOT_VERSION = 3

_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1
_LONGEST_SHOWN = 60  # characters of an invalid value in an error message
_AnyEnum = TypeVar("_AnyEnum", bound=enum.Enum)


class SnapshotError(MoaError):
    """A snapshot cannot be restored. The text of the conversation may still be usable."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a session that outlives its process; the attributes are those of the session."""

    policy: Policy
    limits: Limits
    resume_token: str
    epoch: int
    connection: int
    committed: list[int]
    supplied: list[int]
    kept: int
    tentative: list[int]
    origins: list[Origin]
    answering: bool
    answer_start: int | None
    sampling: Sampling
    max_length: int
    while_away: bool

    def to_json(self, fingerprints: Fingerprints) -> dict[str, Any]:
        """Return JSON values, with the version and the fingerprints of the bundle."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        return data | {
            "version": SNAPSHOT_VERSION,
            "fingerprints": asdict(fingerprints),
            "policy": self.policy.value,
            "limits": asdict(self.limits),
            "origins": [origin.value for origin in self.origins],
            "sampling": asdict(self.sampling),
        }

    @classmethod
    def from_json(cls, data: object, fingerprints: Fingerprints, vocab_size: int = 1 << 32) -> Snapshot:
        """Read a snapshot.

        Raises:
            SnapshotError: if a value is missing or invalid, or the version, target or tokenizer differs.
        """
        top = _Reader(data, "a snapshot")
        version = top.number("version", _UINT64)
        if version != SNAPSHOT_VERSION:
            raise SnapshotError(
                f"the snapshot has version {version}, this program reads version {SNAPSHOT_VERSION}: restore it with "
                "the version of moa-edge that made it, or begin a new conversation"
            )
        made_for = top.inner("fingerprints")
        for name in ("target", "tokenizer"):
            theirs, ours = made_for.text(name), getattr(fingerprints, name)
            if theirs != ours:
                raise SnapshotError(
                    f"the snapshot was made with {name} {_shown(theirs)}, this bundle is for {_shown(ours)}: "
                    "restore it with the bundle that it was made with, or begin a new conversation"
                )
        limits = top.inner("limits")
        snapshot = cls(
            policy=top.choice("policy", Policy),
            limits=Limits(
                max_context=limits.number("max_context", _UINT32),
                max_draft_tokens=limits.number("max_draft_tokens", _UINT32),
                max_frame_bytes=limits.number("max_frame_bytes", _UINT32),
                idle_seconds=limits.number("idle_seconds", _UINT32),
                trees=limits.flag("trees"),
                away_seconds=limits.number("away_seconds", _UINT32),
                keep_seconds=limits.number("keep_seconds", _UINT32),
            ),
            resume_token=top.text("resume_token"),
            epoch=top.number("epoch", _UINT64 // 2),  # the session counts on from it
            connection=top.number("connection", _UINT64 // 2),
            committed=top.tokens("committed", vocab_size),
            supplied=top.tokens("supplied", vocab_size),
            kept=top.number("kept", _UINT32),
            tentative=top.tokens("tentative", vocab_size),
            origins=top.choices("origins", Origin),
            answering=top.flag("answering"),
            answer_start=None if top.get("answer_start") is None else top.number("answer_start", _UINT32),
            sampling=sampling_from_json(top.get("sampling")),
            max_length=top.number("max_length", _UINT64),
            while_away=top.flag("while_away"),
        )
        snapshot._check()
        return snapshot

    def _check(self) -> None:
        """Raise SnapshotError if values contradict each other."""
        known = len(self.committed) + len(self.supplied)
        if len(self.origins) != len(self.tentative):
            raise _broken(f"{len(self.tentative)} tentative tokens have {len(self.origins)} origins")
        if self.kept > len(self.supplied):
            raise _broken(f"{self.kept} of {len(self.supplied)} supplied tokens are kept ones")
        if not self.answering and (self.supplied or self.tentative):
            raise _broken("no answer is running, but tokens await the target")
        if self.answering and (self.answer_start is None or not 0 < self.answer_start <= known):
            raise _broken(f"an answer runs from position {self.answer_start} of {known} tokens")


def sampling_from_json(data: object) -> Sampling:
    """Read the result of ``dataclasses.asdict`` for a Sampling.

    Raises:
        SnapshotError: if a value is missing or invalid.
    """
    sampling = _Reader(data, "sampling")
    return Sampling(
        temperature=sampling.real("temperature"),
        top_p=sampling.real("top_p"),
        seed=sampling.number("seed", _UINT64),
        top_k=sampling.number("top_k", _UINT32),
        min_p=sampling.real("min_p"),
    )


class _Reader:
    """Reads values of the expected types from a JSON object; raises SnapshotError if one is missing or invalid.

    Args:
        data: the object.
        name: name of the object in error messages.
    """

    def __init__(self, data: object, name: str) -> None:
        if not isinstance(data, dict):
            raise _broken(f"{name} must be an object, not {_shown(data)}")
        self._data = data

    def get(self, key: str) -> object:
        if key not in self._data:
            raise _broken(f"{key} is missing")
        return self._data[key]

    def inner(self, key: str) -> _Reader:
        return _Reader(self.get(key), key)

    def text(self, key: str) -> str:
        value = self.get(key)
        # JSON strings may contain lone surrogates, which are no text.
        if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
            raise _broken(f"{key} must be a text, not {_shown(ascii(value))}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise _broken(f"{key} must be true or false, not {_shown(value)}")
        return value

    def number(self, key: str, most: int) -> int:
        value = self.get(key)
        if not _is_whole(value, most):
            raise _broken(f"{key} must be a whole number from 0 to {most}, not {_shown(value)}")
        return value

    def real(self, key: str) -> float:
        value = self.get(key)
        # Negated, so that NaN is refused too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_REAL:
            raise _broken(f"{key} must be a number from 0 to {LARGEST_REAL:g}, not {_shown(value)}")
        return float(value)

    def tokens(self, key: str, vocab_size: int) -> list[int]:
        value = self._list(key)
        wrong = [token for token in value if not _is_whole(token, vocab_size - 1)]
        if wrong:
            raise _broken(f"{key} must be token ids, whole numbers from 0 to {vocab_size - 1}, not {_shown(wrong[0])}")
        return list(value)

    def choice(self, key: str, kind: type[_AnyEnum]) -> _AnyEnum:
        return _member(key, self.get(key), kind)

    def choices(self, key: str, kind: type[_AnyEnum]) -> list[_AnyEnum]:
        return [_member(key, value, kind) for value in self._list(key)]

    def _list(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise _broken(f"{key} must be a list, not {_shown(value)}")
        return value


def _is_whole(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _member(key: str, value: object, kind: type[_AnyEnum]) -> _AnyEnum:
    for member in kind:
        if member.value == value:
            return member
    raise _broken(f"{key} knows {', '.join(member.value for member in kind)}, not {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value or "none"
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _broken(what: str) -> SnapshotError:
    return SnapshotError(f"the snapshot is broken: {what}; begin a new conversation")
