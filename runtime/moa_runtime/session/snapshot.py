"""Snapshots of a client session as JSON: saved by one process, restored by the next."""

from __future__ import annotations

import enum
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, cast

from moa_runtime.errors import MoaError
from moa_runtime.manifest import Fingerprints
from moa_runtime.session.events import (
    GRAMMAR_KINDS,
    LARGEST_REAL,
    MOST_LOGPROBS,
    Grammar,
    GrammarKind,
    Origin,
    Policy,
    Sampling,
)
from moa_runtime.session.handshake import NUMERIC_LIMITS, Limits

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
            "sampling": self.sampling.to_json(),
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
                "the version of moa-edge that made it, or begin a new conversation",
                code="wrong_version",
            )
        made_for = top.inner("fingerprints")
        for name in ("target", "tokenizer"):
            theirs, ours = made_for.text(name), getattr(fingerprints, name)
            if theirs != ours:
                raise SnapshotError(
                    f"the snapshot was made with {name} {_shown(theirs)}, this bundle is for {_shown(ours)}: "
                    "restore it with the bundle that it was made with, or begin a new conversation",
                    code=f"other_{name}",
                )
        limits = top.inner("limits")
        numbers = {name: limits.number(name, _UINT32) for name in NUMERIC_LIMITS}
        snapshot = cls(
            policy=top.choice("policy", Policy),
            limits=Limits(trees=limits.flag("trees"), **numbers),
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
            raise _damaged(f"{len(self.tentative)} tentative tokens have {len(self.origins)} origins")
        if self.kept > len(self.supplied):
            raise _damaged(f"{self.kept} of {len(self.supplied)} supplied tokens are kept ones")
        if not self.answering and (self.supplied or self.tentative):
            raise _damaged("no answer is running, but tokens await the target")
        if self.answering and (self.answer_start is None or not 0 < self.answer_start <= known):
            raise _damaged(f"an answer runs from position {self.answer_start} of {known} tokens")


def sampling_from_json(data: object) -> Sampling:
    """Read the result of :meth:`Sampling.to_json`, or of ``dataclasses.asdict`` for a Sampling.

    Raises:
        SnapshotError: if a value is missing or invalid.
    """
    sampling = _Reader(data, "sampling")
    values: dict[str, Any] = {name: sampling.real(name) for name in ("temperature", "top_p", "min_p")}
    values |= {"seed": sampling.number("seed", _UINT64), "top_k": sampling.number("top_k", _UINT32)}
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        if sampling.has(name):
            values[name] = sampling.real(name, -2 if name != "repetition_penalty" else 0, 10)
    if sampling.has("logit_bias"):
        values["logit_bias"] = sampling.biases("logit_bias")
    if sampling.has("min_tokens"):
        values["min_tokens"] = sampling.number("min_tokens", _UINT32)
    if sampling.has("grammar") and sampling.get("grammar") is not None:
        grammar = sampling.inner("grammar")
        kind = grammar.text("kind")
        _valid("kind", kind, f"one of {', '.join(GRAMMAR_KINDS)}", kind in GRAMMAR_KINDS)
        values["grammar"] = Grammar(cast(GrammarKind, kind), grammar.text("text"))
    if sampling.has("logprobs") and sampling.get("logprobs") is not None:
        values["logprobs"] = sampling.number("logprobs", MOST_LOGPROBS)
    return Sampling(**values)


class _Reader:
    """Reads values of the expected types from a JSON object; raises SnapshotError if one is missing or invalid.

    Args:
        data: the object.
        name: name of the object in error messages.
    """

    def __init__(self, data: object, name: str) -> None:
        if not isinstance(data, dict):
            raise _damaged(f"{name} must be an object, not {_shown(data)}")
        self._data = data

    def get(self, key: str) -> Any:
        if key not in self._data:
            raise _damaged(f"{key} is missing")
        return self._data[key]

    def has(self, key: str) -> bool:
        return key in self._data

    def inner(self, key: str) -> _Reader:
        return _Reader(self.get(key), key)

    def text(self, key: str) -> str:
        value = self.get(key)
        # JSON strings may contain lone surrogates, which are no text.
        return str(_valid(key, value, "a text", isinstance(value, str) and not re.search("[\ud800-\udfff]", value)))

    def flag(self, key: str) -> bool:
        value = self.get(key)
        return bool(_valid(key, value, "true or false", isinstance(value, bool)))

    def number(self, key: str, most: int) -> int:
        value = self.get(key)
        return int(_valid(key, value, f"a whole number from 0 to {most}", _is_whole(value, most)))

    def real(self, key: str, least: float = 0, most: float = LARGEST_REAL) -> float:
        value = self.get(key)
        return float(_valid(key, value, f"a number from {least:g} to {most:g}", _is_real(value, least, most)))

    def biases(self, key: str) -> tuple[tuple[int, float], ...]:
        pairs = self._list(key)
        expected = "pairs of a token and a number from -100 to 100"
        for pair in pairs:
            fits = isinstance(pair, list | tuple) and len(pair) == 2
            _valid(key, pair, expected, fits and _is_whole(pair[0], _UINT32) and _is_real(pair[1], -100, 100))
        return tuple((token, float(bias)) for token, bias in pairs)

    def tokens(self, key: str, vocab_size: int) -> list[int]:
        expected = f"token ids, whole numbers from 0 to {vocab_size - 1}"
        return [_valid(key, token, expected, _is_whole(token, vocab_size - 1)) for token in self._list(key)]

    def choice(self, key: str, kind: type[_AnyEnum]) -> _AnyEnum:
        return _member(key, self.get(key), kind)

    def choices(self, key: str, kind: type[_AnyEnum]) -> list[_AnyEnum]:
        return [_member(key, value, kind) for value in self._list(key)]

    def _list(self, key: str) -> list[Any]:
        value = self.get(key)
        return list(_valid(key, value, "a list", isinstance(value, list | tuple)))


def _valid(key: str, value: Any, expected: str, valid: bool) -> Any:
    """Return the value; raise SnapshotError if it is not valid."""
    if not valid:
        raise _damaged(f"{key} must be {expected}, not {_shown(value)}")
    return value


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_real(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _member(key: str, value: object, kind: type[_AnyEnum]) -> _AnyEnum:
    members = {member.value: member for member in kind}
    return members[_valid(key, value, f"one of {', '.join(members)}", isinstance(value, str) and value in members)]


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _damaged(problem: str) -> SnapshotError:
    return SnapshotError(f"the snapshot is broken: {problem}; begin a new conversation", code="damaged")
