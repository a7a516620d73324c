"""A chat's file: whole, private, of one program at a time; and when it is written."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moa_runtime.chat_store import ChatSaver, ChatStore, StoreError
from moa_runtime.paths import data_dir, free_name
from support.virtual_loop import run_virtually

posix = pytest.mark.skipif(os.name == "nt", reason="modes and signals of POSIX")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "chat.json"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_read(path: Path) -> None:
    store = ChatStore(path)
    assert store.read() is None
    for content in ({"text": "Grüße 🦊"}, {"text": "short"}):
        store.write(content)
        assert store.read() == content
    assert sorted(file.name for file in path.parent.iterdir()) == ["chat.json", "chat.json.lock"]


@posix
def test_only_its_user_can_read_it(path: Path) -> None:
    before = os.umask(0)
    try:
        ChatStore(path).write({})
        assert mode(path.parent) == 0o700
        assert {mode(file) for file in path.parent.iterdir()} == {0o600}
        path.with_name(".chat.json.unfinished").touch(0o666)
        path.chmod(0o644)
        ChatStore(path).write({})
        assert {mode(file) for file in path.parent.iterdir()} == {0o600}
    finally:
        os.umask(before)


@posix
def test_a_link_and_its_file_are_one_chat(path: Path) -> None:
    path.parent.mkdir(parents=True)
    link = path.with_name("link.json")
    link.symlink_to(path)
    store = ChatStore(link)
    with pytest.raises(StoreError, match="is open in another program"):
        ChatStore(path)
    store.write({"text": "\ud83e"})
    assert link.is_symlink() and store.read() == {"text": "\ud83e"}
    os.mkfifo(path.with_name("pipe.json"))
    with pytest.raises(StoreError, match=r"is kept in a file, and .* is none: name another"):
        ChatStore(path.with_name("pipe.json"))


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    store = ChatStore(path)
    store.write({"whole": True})

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if fails == "fsync" else Path, fails, fail)
    with pytest.raises(StoreError, match=r"the chat cannot be written to .*chat\.json: No space left on device"):
        store.write({"whole": False})
    monkeypatch.undo()
    assert store.read() == {"whole": True}
    store.write({"whole": "again"})
    assert store.read() == {"whole": "again"}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_named_and_set_aside(path: Path, content: bytes) -> None:
    store = ChatStore(path)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"the file .*chat\.json is broken: it is no JSON"):
        store.read()
    asides = [store.set_aside()]
    path.write_bytes(content)
    asides.append(store.set_aside())
    assert len(set(asides)) == 2 and all(aside.read_bytes() == content for aside in asides)
    assert store.read() is None


def test_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder: name a file in it"):
        ChatStore(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"the chat cannot be kept in .*file.chat\.json: a part of the name is a file"):
        ChatStore(tmp_path / "file" / "chat.json")


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path))
    assert data_dir() == tmp_path
    monkeypatch.delenv("MOA_EDGE_PROFILE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_dir() == Path("/data/moa-edge")
    assert free_name(tmp_path / "a.json", "old").name.startswith("a-old-2")


class Kept:
    """A keeper whose state is a number, and what was written of it, with the time."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.writes: list[tuple[float, int]] = []
        self.keeper = ChatSaver(lambda: {"number": self.number})
        self.fails = False
        write = ChatStore.write

        def written(store: ChatStore, content: Any) -> None:
            if self.fails:
                raise StoreError("the disk is full")
            write(store, content)
            self.writes.append((asyncio.get_running_loop().time(), content["number"]))

        monkeypatch.setattr(ChatStore, "write", written)
        self.keeper.open(path, lambda content: None)


def test_it_is_written_at_most_once_a_second_and_at_once_where_that_is_wanted(path: Path, monkeypatch) -> None:
    async def run(loop) -> None:
        kept, began = Kept(path, monkeypatch), loop.time()
        for _ in range(35):
            kept.number += 1
            kept.keeper.touch()
            await asyncio.sleep(0.1)
        times = [at - began for at, _ in kept.writes]
        assert len(times) == 3 and all(later - at >= 1.0 for at, later in itertools.pairwise(times))
        kept.number = 77
        await kept.keeper.save()
        assert kept.writes[-1] == (pytest.approx(began + 3.5), 77)
        await asyncio.sleep(5)
        assert len(kept.writes) == 4  # nothing changed since
        await kept.keeper.close()
        assert json.loads(path.read_text()) == {"number": 77}

    run_virtually(run)


def test_who_saves_while_a_write_is_under_way_shares_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write hangs: the loop goes on, and whoever saves meanwhile waits for a write of what is then."""
    hangs, begun, written = threading.Event(), threading.Event(), []

    def write(store: ChatStore, content: Any) -> None:
        begun.set()
        assert hangs.wait(60)
        written.append(content["number"])

    monkeypatch.setattr(ChatStore, "write", write)

    async def run() -> None:
        number = 1
        keeper = ChatSaver(lambda: {"number": number})
        keeper.open(path, lambda content: None)
        first = keeper.save()
        while not begun.is_set():
            await asyncio.sleep(0.001)
        number = 2
        second, third = keeper.save(), keeper.save()
        number = 3
        await asyncio.sleep(0.01)
        assert not first.done() and not second.done()
        hangs.set()
        await asyncio.wait({second, third})
        assert first.done() and written == [1, 3]
        await keeper.close()

    asyncio.run(run())


def test_a_full_disk_is_told_and_forgotten_when_there_is_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(loop) -> None:
        kept = Kept(path, monkeypatch)
        kept.fails = True
        await kept.keeper.save()
        assert kept.keeper.problem == "the disk is full"
        kept.fails = False
        await kept.keeper.save()
        assert kept.keeper.problem == "" and len(kept.writes) == 1
        await kept.keeper.close()

    run_virtually(run)


def test_a_defect_in_a_write_is_told_and_the_next_write_comes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(loop) -> None:
        kept = Kept(path, monkeypatch)
        defects: list[object] = [object()]  # no JSON
        kept.keeper._state = lambda: {"number": defects.pop() if defects else 7}
        first = kept.keeper.save()
        await asyncio.sleep(0)  # it is under way
        second = kept.keeper.save()
        await asyncio.wait_for(first, 10)
        assert kept.keeper.problem.startswith("storing it failed unexpectedly: TypeError")
        await asyncio.wait_for(second, 10)
        assert kept.keeper.problem == "" and json.loads(path.read_text()) == {"number": 7}
        await kept.keeper.close()

    run_virtually(run)


def test_without_a_store_nothing_is_done() -> None:
    async def run(loop) -> None:
        keeper = ChatSaver(lambda: pytest.fail("nobody wants the state"))
        keeper.touch()
        await keeper.save()
        await keeper.close()
        assert not keeper.keeps and keeper.problem == ""

    run_virtually(run)


def test_what_is_of_no_use_is_set_aside_and_two_stores_are_refused(path: Path) -> None:
    async def run(loop) -> None:
        path.parent.mkdir()
        path.write_text('{"number": 1}')
        keeper = ChatSaver(lambda: {})

        def refuse(content: Any) -> None:
            raise StoreError("it is of another target")

        assert keeper.open(path, refuse) is None
        (aside,) = path.parent.glob("chat-set-aside-*.json")
        assert keeper.problem == f"it is of another target; the old file is {aside}"
        assert aside.read_text() == '{"number": 1}'
        with pytest.raises(StoreError, match=r"is kept in .* already"):
            keeper.open(path, refuse)
        await keeper.close()

    run_virtually(run)
