"""The history's tables, and how an older file becomes one of this version."""

from __future__ import annotations

import sqlite3

from moa_runtime.errors import MoaError

#: What leads from version n to n + 1, by n. The file's version is SQLite's ``user_version``.
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


def prepare(database: sqlite3.Connection) -> None:
    """Create the tables, or bring them up to date.

    Raises:
        MoaError: the file is of a newer moa-edge.
        sqlite3.DatabaseError: the file is damaged.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise MoaError(
            f"the history was written by a newer moa-edge (version {version}, this one reads {VERSION}): "
            "upgrade moa-edge to open it"
        )
    if version == 0 and database.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise sqlite3.DatabaseError("it holds other tables than a history's")
    for step in range(version, VERSION):
        # One transaction a step: a crash leaves the old version or the new one.
        database.executescript(f"BEGIN; {_STEPS[step]} PRAGMA user_version = {step + 1}; COMMIT;")
