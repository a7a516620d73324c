"""The history: chats and their messages in SQLite."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moa_chat.history.chat_settings import ChatSettings, settings_from_json
from moa_chat.history.message import ChatSummary, Message, origins_from_json, origins_to_json
from moa_runtime.errors import MoaError
from moa_runtime.paths import free_name

#: Statements that upgrade version n to n + 1, by n. The file's version is SQLite's ``user_version``.
_STEPS = (
    """
    CREATE TABLE chat (
        id INTEGER PRIMARY KEY,
        title TEXT NOT NULL,
        updated REAL NOT NULL,
        deleted INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE message (
        chat INTEGER NOT NULL REFERENCES chat (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        spans TEXT NOT NULL,
        finished INTEGER NOT NULL,
        figures TEXT NOT NULL,
        PRIMARY KEY (chat, position)
    ) WITHOUT ROWID;
    CREATE INDEX chat_by_time ON chat (updated);
    """,
    # JSON; NULL for a chat that has none of its own.
    "ALTER TABLE chat ADD COLUMN settings TEXT;",
)
VERSION = len(_STEPS)
_BUSY_SECONDS = 2.0
_DELETE_FROM = "DELETE FROM message WHERE chat = ? AND position >= ?"


def prepare(database: sqlite3.Connection) -> None:
    """Create or upgrade the tables. Raises MoaError if the file is of a newer moa-edge, DatabaseError if damaged."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        text = f"the history was written by a newer moa-edge (version {version}, this one reads {VERSION})"
        raise MoaError(f"{text}: upgrade moa-edge to open it", code="unknown_version")
    if version == 0 and database.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise sqlite3.DatabaseError("it holds other tables than a history's")
    for step in range(version, VERSION):
        # One transaction a step: a crash leaves the old version or the new one.
        database.executescript(f"BEGIN; {_STEPS[step]} PRAGMA user_version = {step + 1}; COMMIT;")


class History:
    """Chats on disk; every call is one transaction, so that a crash loses nothing that was saved.

    Use :meth:`open`. From one thread only.
    """

    def __init__(self, database: sqlite3.Connection, set_aside: Path | None = None) -> None:
        self._database = database
        self.set_aside = set_aside  # where a damaged file was moved on opening
        # A function of bytes, so that text that is not UTF-8 hides no chat.
        database.create_function("fold", 1, lambda text: text.decode(errors="replace").casefold(), deterministic=True)
        # Chats deleted in an earlier run can no longer be restored.
        self._change("DELETE FROM chat WHERE deleted")

    @classmethod
    def open(cls, path: Path) -> History:
        """Open the file or make it; a damaged one is renamed. Raises MoaError if it is newer or unusable."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return cls(_connect(path))
            except sqlite3.OperationalError:  # locked, no permission, no room: nothing is wrong with the file
                raise
            except sqlite3.DatabaseError:
                aside = _set_aside(path)
                return cls(_connect(path), aside)
        except (OSError, sqlite3.Error) as error:
            raise MoaError(f"the history {path} cannot be opened: {error}", code="history_refused") from error

    def close(self) -> None:
        self._database.close()

    def chats(self, search: str = "") -> list[ChatSummary]:
        """Return the chats, latest first; with a search, those that contain all its words in title or messages."""
        said = "coalesce((SELECT group_concat(content, ' ') FROM message WHERE chat = id), '')"
        text = f"fold(CAST(title || ' ' || {said} AS BLOB))"
        words = search.casefold().split()
        found = "".join(f" AND instr({text}, ?)" for _ in words)
        rows = self._rows(
            "SELECT id, title, CAST(updated AS REAL) FROM chat "
            f"WHERE NOT deleted{found} ORDER BY updated DESC, id DESC",
            words,
        )
        return [ChatSummary(int(chat), str(title), float(updated)) for chat, title, updated in rows]

    def create(self, title: str, settings: ChatSettings | None = None) -> int:
        """Create a chat without messages, and return its id."""
        stored = None if settings is None else json.dumps(asdict(settings))
        row = (title, time.time(), stored)
        return self._change("INSERT INTO chat (title, updated, settings) VALUES (?, ?, ?)", row)

    def settings(self, chat: int) -> ChatSettings | None:
        """Return the settings of a chat; None if it has none of its own, as chats of an older moa-edge."""
        rows = self._rows("SELECT settings FROM chat WHERE id = ?", (chat,))
        return settings_from_json(rows[0][0]) if rows and rows[0][0] is not None else None

    def change_settings(self, chat: int, settings: ChatSettings) -> None:
        self._change("UPDATE chat SET settings = ? WHERE id = ?", (json.dumps(asdict(settings)), chat))

    def rename(self, chat: int, title: str) -> None:
        self._change("UPDATE chat SET title = ? WHERE id = ?", (title, chat))

    def delete(self, chat: int) -> None:
        """Take a chat out of the list; :meth:`restore` brings it back until the history is opened again."""
        self._change("UPDATE chat SET deleted = 1 WHERE id = ?", (chat,))

    def restore(self, chat: int) -> None:
        self._change("UPDATE chat SET deleted = 0 WHERE id = ?", (chat,))

    def unfinished(self) -> list[tuple[int, int]]:
        """Return chats and positions of answers that were being written when a program ended, latest first."""
        rows = self._rows(
            "SELECT chat, position FROM message JOIN chat ON chat.id = chat WHERE NOT deleted AND NOT finished "
            "AND role = 'assistant' ORDER BY updated DESC, chat DESC",
            (),
        )
        return [(int(chat), int(position)) for chat, position in rows]

    def unconfirmed(self) -> list[tuple[int, int]]:
        """Return chats and positions of answers to check; those of a chat in order, the latest chat first."""
        rows = self._rows(
            "SELECT chat, position FROM message JOIN chat ON chat.id = chat WHERE NOT deleted AND finished "
            "AND role = 'assistant' AND instr(spans, '\"unconfirmed\": {') ORDER BY updated DESC, chat DESC, position",
            (),
        )
        return [(int(chat), int(position)) for chat, position in rows]

    def messages(self, chat: int) -> list[Message]:
        rows = self._rows(
            "SELECT role, content, spans, finished, figures FROM message WHERE chat = ? ORDER BY position", (chat,)
        )
        messages = []
        for role, content, spans, finished, figures in rows:
            known = origins_from_json(spans, str(content))
            messages.append(Message(str(role), str(content), finished=bool(finished), figures=str(figures), **known))
        return messages

    def save(self, chat: int, position: int, message: Message) -> None:
        """Write one message, over what was there; the chat moves to the top of the list."""
        with self._transaction():
            self._write(chat, position, [message])

    def replace(self, chat: int, start: int, messages: Sequence[Message]) -> None:
        """Replace all messages from position ``start`` on, in one transaction."""
        with self._transaction():
            self._database.execute(_DELETE_FROM, (chat, start))
            self._write(chat, start, messages)

    def truncate(self, chat: int, length: int) -> None:
        """Drop a chat's messages from position ``length`` on."""
        self._change(_DELETE_FROM, (chat, length))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a transaction. Raises MoaError if SQLite failed, for example on a full disk."""
        try:
            with self._database:
                yield
        except sqlite3.Error as error:
            raise MoaError(f"the history could not be read or written: {error}", code="history_refused") from error

    def _write(self, chat: int, start: int, messages: Sequence[Message]) -> None:
        for position, each in enumerate(messages, start):
            row = (chat, position, each.role, each.content, origins_to_json(each), each.finished, each.figures)
            self._database.execute("INSERT OR REPLACE INTO message VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._database.execute("UPDATE chat SET updated = ? WHERE id = ?", (time.time(), chat))

    def _change(self, statement: str, values: Sequence[object] = ()) -> int:
        with self._transaction():
            return self._database.execute(statement, values).lastrowid or 0

    def _rows(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._transaction():
            return self._database.execute(statement, values).fetchall()


def _connect(path: Path) -> sqlite3.Connection:
    """Open and check the file. Raises sqlite3.DatabaseError, with the file closed, if it is no history."""
    database = sqlite3.connect(path, timeout=_BUSY_SECONDS)
    try:
        path.chmod(0o600)  # conversations are private
        database.text_factory = lambda text: text.decode(errors="replace")  # one damaged letter hides no chat
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        prepare(database)
    except BaseException:
        database.close()
        raise
    return database


def _set_aside(path: Path) -> Path:
    """Rename a damaged file, its log included, to a name that is free."""
    aside = path.rename(free_name(path, "damaged"))
    for ending in ("-wal", "-shm"):
        log = path.with_name(path.name + ending)
        if log.exists():
            log.rename(aside.with_name(aside.name + ending))
    return aside
