"""The history of chats in SQLite."""

from __future__ import annotations

import os
import sqlite3
import stat

import pytest

from moa_chat.history.chat_settings import ChatSettings
from moa_chat.history.message import Dropped, Message, title_of
from moa_chat.history.store import _STEPS, VERSION, History
from moa_runtime.errors import MoaError
from moa_runtime.events import Origin, TextSpan

ANSWER = Message(
    "assistant",
    "Ja, 🎨 **gut**",
    (TextSpan("Ja, 🎨", Origin.DRAFTED, True), TextSpan(" **gut**", Origin.OFFLINE, False)),
    (Dropped(4, "nein"),),
    finished=False,
    figures="12 tokens",
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "history.sqlite"


def test_odd_values_hide_no_chat(path):
    history = History.open(path)
    odd, good = history.create("odd"), history.create("good")
    history.save(good, 0, Message("user", "A colour?"))
    history.close()
    database = sqlite3.connect(path)
    database.execute("UPDATE chat SET title = ?, updated = 'yesterday' WHERE id = ?", (b"\xff\xfe", odd))
    database.execute("INSERT INTO message SELECT ?, 0, role, ?, spans, finished, figures FROM message", (odd, b"\xff"))
    database.commit()
    database.close()
    history = History.open(path)
    assert {chat.id for chat in history.chats()} == {odd, good}
    assert [chat.id for chat in history.chats("colour")] == [good]
    history.close()


@pytest.fixture
def history(path):
    opened = History.open(path)
    yield opened
    opened.close()


def filled(history: History, title: str, *contents: str) -> int:
    chat = history.create(title)
    for position, content in enumerate(contents):
        history.save(chat, position, Message("user", content))
    return chat


def test_messages_come_back_as_they_were_saved(history, path):
    chat = history.create("Colours")
    history.save(chat, 0, Message("user", "Gut?"))
    history.save(chat, 1, Message("assistant", "Ja", finished=False))
    history.save(chat, 1, ANSWER)
    assert history.messages(chat) == [Message("user", "Gut?"), ANSWER]
    history.close()
    again = History.open(path)
    assert again.messages(chat) == [Message("user", "Gut?"), ANSWER] and again.set_aside is None
    again.close()


def test_settings_of_a_chat(history):
    plain, own = history.create("Plain"), history.create("Own", ChatSettings("Be\nbrief.", temperature=0.5))
    assert history.settings(plain) is None
    assert history.settings(own) == ChatSettings("Be\nbrief.", temperature=0.5)
    history.change_settings(plain, ChatSettings(max_new_tokens=7))
    assert history.settings(plain) == ChatSettings(max_new_tokens=7)
    assert history.settings(99) is None


def test_a_history_of_the_first_version_goes_on(path):
    path.parent.mkdir()
    database = sqlite3.connect(path)
    database.executescript(f"BEGIN; {_STEPS[0]} PRAGMA user_version = 1; COMMIT;")
    database.execute("INSERT INTO chat (title, updated) VALUES ('Colours', 1)")
    database.execute("INSERT INTO message VALUES (1, 0, 'user', 'Gut?', '{\"spans\": [], \"dropped\": []}', 1, '')")
    database.commit()
    database.close()
    history = History.open(path)
    assert history.messages(1) == [Message("user", "Gut?")] and history.settings(1) is None
    history.change_settings(1, ChatSettings("Be brief."))
    assert history.settings(1) == ChatSettings("Be brief.") and history.set_aside is None
    history.close()


def test_the_latest_chat_is_first(history):
    first, second = filled(history, "First", "a"), filled(history, "Second", "b")
    assert [chat.id for chat in history.chats()] == [second, first]
    history.save(first, 1, ANSWER)
    assert [chat.title for chat in history.chats()] == ["First", "Second"]


@pytest.mark.parametrize(
    ("search", "found"),
    [("fox", ["Animals"]), ("FÜCHSE", ["Tiere"]), ("50%", ["Prices"]), ("animals quick", ["Animals"]), ("cat dog", [])],
)
def test_search_looks_into_titles_and_messages(history, search, found):
    filled(history, "Animals", "The quick brown fox.", "And the cat?")
    filled(history, "Tiere", "Wo leben Füchse?")
    filled(history, "Prices", "They fell by 50% and 5 cents.")
    filled(history, "Empty")
    assert [chat.title for chat in history.chats(search)] == found


def test_rename_truncate_delete_and_take_back(history, path):
    chat = filled(history, "Old", "a", "b", "c")
    history.rename(chat, "New")
    history.truncate(chat, 1)
    assert [message.content for message in history.messages(chat)] == ["a"]
    history.delete(chat)
    assert history.chats() == []
    history.restore(chat)
    assert [one.title for one in history.chats()] == ["New"]
    history.delete(chat)
    history.close()
    again = History.open(path)
    assert again.messages(chat) == [], "what was deleted in an earlier run is gone"
    again.close()


@pytest.mark.parametrize("content", [b"this is no database", b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_file_is_kept_and_a_new_one_begun(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    history = History.open(path)
    assert history.set_aside is not None and history.set_aside.read_bytes() == content
    assert history.set_aside.parent == path.parent and "damaged" in history.set_aside.name
    filled(history, "Works", "a")
    history.close()


def test_two_damaged_files_are_both_kept(path):
    path.parent.mkdir()
    kept = []
    for number in range(2):
        path.write_bytes(b"damaged %d" % number)
        history = History.open(path)
        kept.append(history.set_aside)
        history.close()
        path.unlink()
    assert [one.read_bytes() for one in kept] == [b"damaged 0", b"damaged 1"]


def test_a_page_overwritten_in_the_middle_is_noticed(path):
    history = History.open(path)
    filled(history, "Chat", *("text " * 200 for _ in range(50)))
    history.close()
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 4] = os.urandom(4096 * 3)
    path.write_bytes(content)
    history = History.open(path)
    assert history.set_aside.read_bytes() == bytes(content) and history.chats() == []
    history.close()


def test_another_programs_database_is_not_written_to(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE thing (a)")
    other.close()
    history = History.open(path)
    assert history.set_aside is not None
    history.close()


def test_a_newer_file_is_left_alone(path):
    history = History.open(path)
    filled(history, "Chat", "a")
    history.close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    with pytest.raises(MoaError, match="newer moa-edge"):
        History.open(path)
    assert [file.name for file in path.parent.iterdir() if "damaged" in file.name] == []


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_only_the_owner_can_read_it(history, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoaError, match=r"history .* cannot be opened"):
        History.open(tmp_path / "file" / "history.sqlite")


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("Name three colours.", "Name three colours."),
        ("\n\n  Hello   there\nsecond line", "Hello there"),
        ("   ", "New chat"),
        ("word " * 30, "word word word word word word word word word…"),
    ],
)
def test_titles(question, title):
    assert title_of(question) == title
