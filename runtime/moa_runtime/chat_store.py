"""A stored chat: its state (:class:`ChatState`), when it is written (:class:`ChatSaver`), and its file
(:class:`ChatStore`), which is written by one program at a time, completely or not at all."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from moa_runtime.atomic_file import lock, open_private, replace_private
from moa_runtime.conversation import Unconfirmed, checked_marks, checked_turn, mark_from_json
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.events import FinishReason, Origin, Statistics
from moa_runtime.manifest import Fingerprints, checked_count
from moa_runtime.paths import expanded, free_name, resolved
from moa_runtime.session.client import ClientSession
from moa_runtime.transport import checked_session_id, new_session_id

T = TypeVar("T")

STATE_VERSION = 1
_MOST_TOKENS = 1 << 24  # of an answer: far more than any context holds
_SECONDS_BETWEEN_WRITES = 1.0


class StoreError(MoaError):
    """Another program uses the chat's file, or it cannot be read or written."""


@dataclass(frozen=True)
class AnswerState:
    """An answer whose end the application has not received.

    Attributes:
        question: the turn that it answers.
        kept: tokens before the question's own that stayed when it was asked.
        start: absolute position of the answer's first token.
        origins: of its committed tokens.
        ended: how it ended; None if it is being written, or if the user stopped it.
    """

    question: dict[str, Any]
    kept: int
    start: int
    origins: tuple[Origin, ...]
    statistics: Statistics
    ended: FinishReason | None

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            # As older programs have it, if it is the user's.
            "question": self.question["content"] if self.question["role"] == "user" else self.question,
            "origins": [[origin.value, len(list(run))] for origin, run in groupby(self.origins)],
            "statistics": asdict(self.statistics),
            "ended": None if self.ended is None else self.ended.value,
        }

    @classmethod
    def from_json(cls, data: Any) -> AnswerState:
        """Read what :meth:`to_json` made; raise KeyError, TypeError or ValueError if it is malformed."""
        runs = [(Origin(origin), checked_count(length)) for origin, length in data["origins"]]
        if sum(length for _, length in runs) > _MOST_TOKENS:
            raise ValueError(f"an answer of more than {_MOST_TOKENS} tokens")
        asked = data["question"]
        return cls(
            question=checked_turn(asked if isinstance(asked, dict) else {"role": "user", "content": asked}),
            kept=checked_count(data["kept"]),
            start=checked_count(data["start"]),
            origins=tuple(origin for origin, length in runs for _ in range(length)),
            statistics=Statistics(**{each.name: _figure(each.name, data["statistics"]) for each in fields(Statistics)}),
            ended=None if data["ended"] is None else FinishReason(data["ended"]),
        )


@dataclass(frozen=True)
class ChatState:
    """The state of a chat.

    Attributes:
        server: the verifier's address. Another verifier gets neither the resume token nor the session id.
        session: :meth:`ClientSession.snapshot`.
        messages: the turns, without those of an unfinished answer.
        ends: pairs of a number of turns and the committed tokens that they take.
        answer: the unfinished answer.
        unconfirmed: marks of the turns that the target has not confirmed.
    """

    server: str
    session: dict[str, Any]
    messages: list[dict[str, Any]]
    ends: list[tuple[int, int]]
    answer: AnswerState | None
    unconfirmed: list[Unconfirmed] = field(default_factory=list)
    session_id: str = field(default_factory=new_session_id)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "version": STATE_VERSION,
            "answer": None if self.answer is None else self.answer.to_json(),
            "unconfirmed": [asdict(mark) for mark in self.unconfirmed],
        }

    @classmethod
    def from_json(cls, data: Any) -> ChatState:
        """Read what :meth:`to_json` made; raise StoreError if it is malformed. The session is not checked."""
        if isinstance(data, dict) and data.get("version", STATE_VERSION) != STATE_VERSION:
            raise StoreError(
                f"the chat's file has version {data['version']!r}, this program reads version {STATE_VERSION}: open it "
                "with the version of moa-edge that wrote it",
                code="unknown_version",
            )
        try:
            messages = [checked_turn(turn) for turn in data["messages"]]
            marks = [mark_from_json(mark) for mark in data.get("unconfirmed", [])]
            return cls(
                server=str(data["server"]),
                session=dict(data["session"]),
                messages=messages,
                ends=[(checked_count(turns), checked_count(length)) for turns, length in data["ends"]],
                answer=None if data["answer"] is None else AnswerState.from_json(data["answer"]),
                unconfirmed=checked_marks(marks, messages),
                session_id=checked_session_id(data.get("session_id", new_session_id())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, MoaError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise StoreError(f"the chat's file is broken: {why}", code="damaged") from error

    def session_id_for(self, server: str) -> str:
        """Return the session id for connections to ``server``: a new one if it is another server."""
        return self.session_id if server == self.server else new_session_id()

    def restore(
        self, server: str, fingerprints: Fingerprints, *, stop_tokens: Sequence[int], row_encoding: int, vocab_size: int
    ) -> ClientSession:
        """Restore the session, see :meth:`ClientSession.restore`; raise StoreError if the turns do not fit it."""
        snapshot = self.session if server == self.server else self.session | {"resume_token": ""}
        session = ClientSession.restore(
            snapshot, fingerprints, stop_tokens=stop_tokens, row_encoding=row_encoding, vocab_size=vocab_size
        )
        committed, answer = len(session.committed), self.answer
        if self.ends != sorted(self.ends) or any(turns > len(self.messages) for turns, _ in self.ends):
            raise StoreError("the chat's file is broken: its turns have other ends than its tokens", code="damaged")
        if answer is None:
            if session.answering:  # an answer that the application has given up
                session.cancel()
        elif not answer.kept < answer.start or len(answer.origins) != max(0, committed - answer.start):
            raise StoreError(
                f"the chat's file is broken: an answer from {answer.start} on has {len(answer.origins)} tokens where "
                f"{committed} are confirmed",
                code="damaged",
            )
        return session


class ChatSaver:
    """Write a chat's state to its :class:`ChatStore`: at once what must not be lost, the rest about once a second.

    Writes run in a thread, so that a slow disk does not block the event loop and its connection. One write runs at a
    time; requests made meanwhile share the next one, which takes the state of that moment. Without a store it does
    nothing.

    Args:
        state: returns the chat's state as JSON; called in the event loop, and later changes must not affect the result.
    """

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state
        self._store: ChatStore | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moa-store")
        self._wanted: asyncio.Future[None] | None = None  # the next write
        self._writing: asyncio.Task[None] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._not_restored = self._not_written = ""

    @property
    def keeps(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @property
    def problem(self) -> str:
        """Why the chat is not stored, or why the stored one was not continued; empty if all is well."""
        return self._not_written or self._not_restored

    def open(self, path: str | Path, restore: Callable[[Any], T]) -> T | None:
        """Keep the chat in the file ``path`` from now on.

        Args:
            restore: called with the file's content.

        Returns:
            what ``restore`` returned; None if there was no file, or if it was unusable and has been renamed.

        Raises:
            StoreError: another program uses the file, it can be neither used nor renamed, or there is a store.
        """
        if self._store is not None:
            raise StoreError(f"the chat is kept in {self._store.path} already", code="already_stored")
        store = ChatStore(path)
        try:
            try:
                content = store.read()
                restored = None if content is None else restore(content)
            except MoaError as error:
                self._not_restored = f"{error}; the old file is {store.set_aside()}"
                restored = None
        except BaseException:
            store.close()
            raise
        self._store = store
        return restored

    def touch(self) -> None:
        """Have a change that may be lost written within about a second."""
        if self._store is not None and self._clock is None and self._wanted is None:
            self._clock = asyncio.get_running_loop().call_later(_SECONDS_BETWEEN_WRITES, self.save)

    def save(self) -> asyncio.Future[None]:
        """Write the present state; return a future, not to be cancelled, that is done after the attempt."""
        loop = asyncio.get_running_loop()
        self._stop_clock()
        wanted = self._wanted or loop.create_future()
        if self._store is None:
            wanted.set_result(None)
        elif self._wanted is None:
            self._wanted = wanted
            if self._writing is None or self._writing.done():
                self._writing = loop.create_task(self._write(self._store))
        return wanted

    async def close(self) -> None:
        """Write the present state and release the file."""
        self.save()
        if self._writing is not None:
            await asyncio.wait({self._writing})
        self._stop_clock()
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self._thread.shutdown(wait=False)

    async def _write(self, store: ChatStore) -> None:
        loop = asyncio.get_running_loop()
        while self._wanted is not None:
            written, self._wanted = self._wanted, None
            try:
                await loop.run_in_executor(self._thread, store.write, self._state())
                self._not_written = ""
            except StoreError as error:
                self._not_written = str(error)
            except Exception as error:  # a defect: later writes would wait for ever
                self._not_written = f"storing it failed unexpectedly: {error!r}"
            finally:
                written.set_result(None)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class ChatStore:
    """One JSON file, with ``NAME.lock`` beside it, which the system unlocks when its program ends in any way.

    Only :meth:`write` may be called in another thread.

    Args:
        path: the file. If its folder does not exist, it is made, readable by its user alone.

    Raises:
        StoreError: another program uses the file, it is a folder, or nothing can be written beside it.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = resolved(expanded(path))  # through links, so that a chat has one lock
            if self.path.is_dir():
                text = f"a chat is kept in a file, and {self.path} is a folder: name a file in it"
                raise StoreError(text, code="not_a_file")
            if self.path.exists() and not self.path.is_file():  # reading a pipe would block
                raise StoreError(f"a chat is kept in a file, and {self.path} is none: name another", code="not_a_file")
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open_private(self.path.with_name(f"{self.path.name}.lock"))
        except OSError as error:
            text = f"the chat cannot be kept in {path}: {reason_of(error)}"
            raise StoreError(text, code="path_refused") from error
        try:
            lock(self._lock)
        except OSError as error:
            self._lock.close()
            text = f"the chat in {self.path} is open in another program: close it there, or name another file"
            raise StoreError(text, code="in_use") from error

    def read(self) -> Any:
        """Return the file's content, or None without a file; raise StoreError if it cannot be read or is no JSON."""
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"the chat in {self.path} cannot be read: {error.strerror}", code="unreadable") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"the file {self.path} is broken: it is no JSON", code="damaged") from error

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file's content and sync it to disk; raise StoreError, with the old content left, if it fails."""
        try:
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            replace_private(self.path, [text.encode(errors="backslashreplace")])  # half a character as JSON escapes it
        except OSError as error:
            text = f"the chat cannot be written to {self.path}: {error.strerror}"
            raise StoreError(text, code="cannot_write") from error

    def set_aside(self) -> Path:
        """Rename the unusable file and return its new name; raise StoreError if it cannot be renamed."""
        aside = free_name(self.path, "set-aside")
        try:
            return self.path.rename(aside)
        except OSError as error:
            text = f"the file {self.path} cannot be renamed to {aside.name}: {error.strerror}"
            raise StoreError(text, code="cannot_write") from error

    def close(self) -> None:
        """Release the file."""
        self._lock.close()


def _figure(name: str, data: Any) -> Any:
    """Return a figure of an answer after checking its type against that of :class:`Statistics`."""
    if name == "dtype":  # missing in files of earlier versions
        if not re.fullmatch("[a-z0-9, ]{0,200}", dtype := data.get(name, "")):
            raise ValueError("dtype names no types of numbers")
        return dtype
    if name == "verified":  # likewise
        return [(checked_count(drafted), checked_count(accepted)) for drafted, accepted in data.get(name, [])]
    value = data.get(name, 0) if name == "dropped_turns" else data[name]  # likewise
    kind = type(getattr(Statistics(), name))
    if kind is list:
        return [_seconds(each) for each in value]
    if kind is int:
        return checked_count(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    return None if value is None and kind is not float else _seconds(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)
