"""The history of chats in SQLite."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moa_chat import strings
from moa_chat.history.chat_settings import ChatSettings
from moa_chat.history.message import Dropped, Message, title_of
from moa_chat.history.store import _STEPS, VERSION, History
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import Origin, TextSpan
from moa_runtime.session.events import Sampling
from support.refusals import refused

ANSWER = Message(
    "assistant",
    "Ja, 🎨 **gut**",
    (TextSpan("Ja, 🎨", Origin.DRAFTED, True), TextSpan(" **gut**", Origin.OFFLINE, False)),
    (Dropped(4, "nein"),),
    finished=False,
    figures="12 tokens",
    unconfirmed=Unconfirmed(1, Sampling(0.7, 0.9, 3), 64),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "history.sqlite"


@pytest.fixture
def open_history(path: Path) -> Iterator[Callable[[], History]]:
    """Opens the file, once more after the one before is closed."""
    opened: list[History] = []

    def open_it() -> History:
        while opened:
            opened.pop().close()
        opened.append(History.open(path))
        return opened[-1]

    yield open_it
    for history in opened:
        history.close()


@pytest.fixture
def history(open_history: Callable[[], History]) -> History:
    return open_history()


@contextlib.contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path)) as opened, opened:
        yield opened


def filled(history: History, title: str, *contents: str) -> int:
    chat = history.create(title)
    for position, content in enumerate(contents):
        history.save(chat, position, Message("user", content))
    return chat


def test_odd_values_hide_no_chat(history, open_history, path):
    odd, good = history.create("odd"), filled(history, "good", "A colour?")
    with database(path) as raw:
        raw.execute("UPDATE chat SET title = ?, updated = 'yesterday' WHERE id = ?", (b"\xff\xfe", odd))
        raw.execute("INSERT INTO message SELECT ?, 0, role, ?, spans, finished, figures FROM message", (odd, b"\xff"))
    again = open_history()
    assert {chat.id for chat in again.chats()} == {odd, good}
    assert [chat.id for chat in again.chats("colour")] == [good]


def test_messages_and_settings_come_back_as_they_were_saved(history, open_history, path):
    chat = history.create("Colours")
    history.save(chat, 0, Message("user", "Gut?"))
    history.save(chat, 1, Message("assistant", "Ja", finished=False))
    history.save(chat, 1, ANSWER)
    assert history.messages(chat) == [Message("user", "Gut?"), ANSWER]
    own = history.create("Own", ChatSettings("Be\nbrief.", temperature=0.5))
    assert history.settings(chat) is None and history.settings(99) is None
    history.change_settings(chat, ChatSettings(max_new_tokens=7))
    again = open_history()
    assert again.messages(chat) == [Message("user", "Gut?"), ANSWER] and again.set_aside is None
    assert again.settings(own) == ChatSettings("Be\nbrief.", temperature=0.5)
    assert again.settings(chat) == ChatSettings(max_new_tokens=7)
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_history_of_the_first_version_is_upgraded(open_history, path):
    with database(path) as raw:
        raw.executescript(f"BEGIN; {_STEPS[0]} PRAGMA user_version = 1; COMMIT;")
        raw.execute("INSERT INTO chat (title, updated) VALUES ('Colours', 1)")
        raw.execute("INSERT INTO message VALUES (1, 0, 'user', 'Gut?', '{\"spans\": [], \"dropped\": []}', 1, '')")
    history = open_history()
    assert history.messages(1) == [Message("user", "Gut?")] and history.settings(1) is None
    history.change_settings(1, ChatSettings("Be brief."))
    assert history.settings(1) == ChatSettings("Be brief.") and history.set_aside is None


def test_chats_are_listed_by_time_and_searched_in_titles_and_messages(history):
    filled(history, "Animals", "The quick brown fox.", "And the cat?")
    filled(history, "Tiere", "Wo leben Füchse?")
    prices = filled(history, "Prices", "They fell by 50% and 5 cents.")
    filled(history, "Empty")
    history.save(prices, 1, ANSWER)
    assert [chat.title for chat in history.chats()] == ["Prices", "Empty", "Tiere", "Animals"]
    for search, found in (
        ("fox", ["Animals"]),
        ("FÜCHSE", ["Tiere"]),
        ("50%", ["Prices"]),
        ("animals quick", ["Animals"]),
        ("cat dog", []),
    ):
        assert [chat.title for chat in history.chats(search)] == found


def test_a_chat_is_renamed_cut_deleted_and_restored(history, open_history):
    chat = filled(history, "Old", "a", "b", "c")
    history.rename(chat, "New")
    history.truncate(chat, 1)
    assert [message.content for message in history.messages(chat)] == ["a"]
    history.delete(chat)
    assert history.chats() == []
    history.restore(chat)
    assert [one.title for one in history.chats()] == ["New"]
    history.delete(chat)
    assert open_history().messages(chat) == [], "a chat deleted in an earlier run is gone"


@pytest.mark.parametrize("content", [b"this is no database", b"SQLite format 3\0" + bytes(5000), "a page"])
def test_each_damaged_file_is_kept_and_a_new_one_begun(open_history, path, content):
    if content == "a page":  # overwritten in the middle
        filled(open_history(), "Chat", *("text " * 200 for _ in range(50)))
        open_history().close()
        damaged = bytearray(path.read_bytes())
        damaged[4096 : 4096 * 4] = os.urandom(4096 * 3)
        content = bytes(damaged)
    kept = []
    for suffix in (b"", b"more"):
        path.write_bytes(content + suffix)
        history = open_history()
        kept.append(history.set_aside)
        assert history.chats() == [] and history.set_aside.parent == path.parent
        filled(history, "Works", "a")
        history.close()
    assert [one.read_bytes() for one in kept] == [content, content + b"more"]
    assert all("damaged" in one.name for one in kept)


def test_a_database_of_another_program_is_not_written_to(open_history, path):
    with database(path) as other:
        other.execute("CREATE TABLE thing (a)")
    assert open_history().set_aside is not None


def test_a_newer_file_is_left_alone(history, path):
    filled(history, "Chat", "a")
    history.close()
    with database(path) as raw:
        raw.execute(f"PRAGMA user_version = {VERSION + 1}")
    with refused("unknown_version"):
        History.open(path)
    assert not any("damaged" in file.name for file in path.parent.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with refused("history_refused"):
        History.open(tmp_path / "file" / "history.sqlite")


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("Name three colours.", "Name three colours."),
        ("\n\n  Hello   there\nsecond line", "Hello there"),
        ("   ", strings.NEW_CHAT),
        ("word " * 30, "word word word word word word word word word…"),
    ],
)
def test_a_title_is_the_first_line_of_the_question(question, title):
    assert title_of(question) == title


def test_a_full_disk_is_told_and_keeps_what_was_saved(history):
    chat = history.create("Colours")
    history.save(chat, 0, Message("user", "Name three."))
    [(pages,)] = history._rows("PRAGMA page_count", ())
    history._rows(f"PRAGMA max_page_count = {pages}", ())  # what SQLite does then is what it does on a full disk
    with refused("history_refused"):
        history.save(chat, 1, Message("assistant", "red " * 10_000))
    assert [message.content for message in history.messages(chat)] == ["Name three."]
    history._rows("PRAGMA max_page_count = 100000", ())
    history.save(chat, 1, Message("assistant", "Red."))
    assert [message.content for message in history.messages(chat)] == ["Name three.", "Red."]
