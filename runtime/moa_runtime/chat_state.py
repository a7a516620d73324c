"""What a chat's file holds: the session, the turns, and an answer under way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

from moa_runtime.bundle import Fingerprints
from moa_runtime.chat_store import StoreError
from moa_runtime.conversation import checked_turn
from moa_runtime.errors import MoaError
from moa_runtime.events import FinishReason, Origin, Statistics
from moa_runtime.session.client import ClientSession
from moa_runtime.session_id import checked_session_id, new_session_id
from moa_runtime.unconfirmed import Unconfirmed, checked_marks, mark_from_json

STATE_VERSION = 1
_MOST_TOKENS = 1 << 24  # of an answer: far more than any context holds


@dataclass(frozen=True)
class AnswerState:
    """An answer whose end the application has not heard.

    Attributes:
        question: what is answered.
        kept: how many of the tokens before it stayed when it was asked.
        start: absolute position of the answer's first token.
        origins: of its confirmed tokens.
        statistics: its figures.
        ended: how it ended; None for one that runs, or that the user stopped.
    """

    question: str
    kept: int
    start: int
    origins: tuple[Origin, ...]
    statistics: Statistics
    ended: FinishReason | None

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "kept": self.kept,
            "start": self.start,
            "origins": [[origin.value, len(list(run))] for origin, run in groupby(self.origins)],
            "statistics": asdict(self.statistics),
            "ended": None if self.ended is None else self.ended.value,
        }

    @classmethod
    def from_json(cls, data: Any) -> AnswerState:
        """Raises KeyError, TypeError or ValueError where it is broken."""
        runs = [(Origin(origin), _count(length)) for origin, length in data["origins"]]
        if sum(length for _, length in runs) > _MOST_TOKENS:
            raise ValueError(f"an answer of more than {_MOST_TOKENS} tokens")
        return cls(
            question=checked_turn({"role": "user", "content": data["question"]})["content"],
            kept=_count(data["kept"]),
            start=_count(data["start"]),
            origins=tuple(origin for origin, length in runs for _ in range(length)),
            statistics=Statistics(**{each.name: _figure(each.name, data["statistics"]) for each in fields(Statistics)}),
            ended=None if data["ended"] is None else FinishReason(data["ended"]),
        )


@dataclass(frozen=True)
class ChatState:
    """A chat at one moment.

    Attributes:
        server: the verifier's address. Another one is not told the resume token, nor the session id.
        session: :meth:`ClientSession.snapshot`.
        messages: the turns, without those of an answer under way.
        ends: how many committed tokens so many turns take.
        answer: the one under way.
        unconfirmed: those of the turns.
        session_id: by which proxies find the verifier that has the conversation.
    """

    server: str
    session: dict[str, Any]
    messages: list[dict[str, str]]
    ends: list[tuple[int, int]]
    answer: AnswerState | None
    unconfirmed: list[Unconfirmed] = field(default_factory=list)
    session_id: str = field(default_factory=new_session_id)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "server": self.server,
            "messages": self.messages,
            "ends": self.ends,
            "answer": None if self.answer is None else self.answer.to_json(),
            "unconfirmed": [asdict(mark) for mark in self.unconfirmed],
            "session_id": self.session_id,
            "session": self.session,
        }

    @classmethod
    def from_json(cls, data: Any) -> ChatState:
        """What :meth:`to_json` made; the session is not looked at.

        Raises:
            StoreError: another version, or it is broken.
        """
        if isinstance(data, dict) and data.get("version", STATE_VERSION) != STATE_VERSION:
            raise StoreError(
                f"the chat's file has version {data['version']!r}, this program reads version {STATE_VERSION}: open it "
                "with the version of moa-edge that wrote it"
            )
        try:
            messages = [checked_turn(turn) for turn in data["messages"]]
            marks = [mark_from_json(mark) for mark in data.get("unconfirmed", [])]
            return cls(
                server=str(data["server"]),
                session=dict(data["session"]),
                messages=messages,
                ends=[(_count(turns), _count(length)) for turns, length in data["ends"]],
                answer=None if data["answer"] is None else AnswerState.from_json(data["answer"]),
                unconfirmed=checked_marks(marks, messages),
                session_id=checked_session_id(data.get("session_id", new_session_id())),
            )
        except KeyError as error:
            raise StoreError(f"the chat's file is broken: {error.args[0]} is missing") from error
        except (TypeError, ValueError, AttributeError, MoaError) as error:
            raise StoreError(f"the chat's file is broken: {error}") from error

    def session_id_for(self, server: str) -> str:
        """The id for the next connections; a new one where they lead elsewhere."""
        return self.session_id if server == self.server else new_session_id()

    def restore(
        self, server: str, fingerprints: Fingerprints, *, stop_tokens: Sequence[int], row_encoding: int, vocab_size: int
    ) -> ClientSession:
        """The session, see :meth:`ClientSession.restore`.

        Raises:
            SnapshotError: see there.
            StoreError: turns and session do not fit together.
        """
        snapshot = self.session if server == self.server else self.session | {"resume_token": ""}
        session = ClientSession.restore(
            snapshot, fingerprints, stop_tokens=stop_tokens, row_encoding=row_encoding, vocab_size=vocab_size
        )
        committed, answer = len(session.committed), self.answer
        if self.ends != sorted(self.ends) or any(turns > len(self.messages) for turns, _ in self.ends):
            raise StoreError("the chat's file is broken: its turns have other ends than its tokens")
        if answer is None:
            if session.answering:  # and nobody waits for it
                session.cancel()
        elif not answer.kept < answer.start or len(answer.origins) != max(0, committed - answer.start):
            raise StoreError(
                f"the chat's file is broken: an answer from {answer.start} on has {len(answer.origins)} tokens where "
                f"{committed} are confirmed"
            )
        return session


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _figure(name: str, data: Any) -> Any:
    """A figure of an answer; its type is that of a new answer's."""
    value, kind = data[name], type(getattr(Statistics(), name))
    if kind is list:
        return [_seconds(each) for each in value]
    if kind is int:
        return _count(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    return None if value is None and kind is not float else _seconds(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)
