"""A chat's file: complete, private, used by one program at a time; and when it is written."""

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
from moa_runtime.paths import cache_dir, data_dir, free_name
from support.refusals import refused
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
    with refused("in_use", StoreError):
        ChatStore(path)
    store.write({"text": "\ud83e"})
    assert link.is_symlink() and store.read() == {"text": "\ud83e"}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    store = ChatStore(path)
    store.write({"whole": True})

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if fails == "fsync" else Path, fails, fail)
    with refused("cannot_write", StoreError) as caught:
        store.write({"whole": False})
    assert str(path) in str(caught.value)
    monkeypatch.undo()
    assert store.read() == {"whole": True}
    store.write({"whole": "again"})
    assert store.read() == {"whole": "again"}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_named_and_set_aside(path: Path, content: bytes) -> None:
    store = ChatStore(path)
    asides = []
    for _ in range(2):
        path.write_bytes(content)
        with refused("damaged", StoreError) as caught:
            store.read()
        assert str(path) in str(caught.value)
        asides.append(store.set_aside())
    assert len(set(asides)) == 2 and all(aside.read_bytes() == content for aside in asides)
    assert store.read() is None


def test_a_path_that_can_be_no_file_is_refused(tmp_path: Path) -> None:
    with refused("not_a_file", StoreError):
        ChatStore(tmp_path)
    (tmp_path / "file").touch()
    with refused("path_refused", StoreError):
        ChatStore(tmp_path / "file" / "chat.json")
    if os.name != "nt":
        (tmp_path / "circle").symlink_to(tmp_path / "circle")
        with refused("path_refused", StoreError):
            ChatStore(tmp_path / "circle" / "chat.json")
        os.mkfifo(tmp_path / "pipe.json")
        with refused("not_a_file", StoreError):
            ChatStore(tmp_path / "pipe.json")


def test_folders_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for own, standard, folder in (
        ("MOA_EDGE_PROFILE", "XDG_DATA_HOME", data_dir),
        ("MOA_EDGE_CACHE", "XDG_CACHE_HOME", cache_dir),
    ):
        monkeypatch.setenv(own, str(tmp_path))
        assert folder() == tmp_path
        monkeypatch.delenv(own)
        monkeypatch.setenv(standard, "/standard")
        assert folder() == Path("/standard/moa-edge")
    assert free_name(tmp_path / "a.json", "old").name.startswith("a-old-2")


class Kept:
    """A saver whose state is a number, with its writes and their times."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.writes: list[tuple[float, int]] = []
        self.saver = ChatSaver(lambda: {"number": self.number})
        self.fails = False
        write = ChatStore.write

        def written(store: ChatStore, content: Any) -> None:
            if self.fails:
                raise StoreError("the disk is full", code="disk_full")
            write(store, content)
            self.writes.append((asyncio.get_running_loop().time(), content["number"]))

        monkeypatch.setattr(ChatStore, "write", written)
        self.saver.open(path, lambda content: None)


def test_it_is_written_at_most_once_a_second_and_at_once_if_wanted(path: Path, monkeypatch) -> None:
    async def run(loop) -> None:
        kept, began = Kept(path, monkeypatch), loop.time()
        for _ in range(35):
            kept.number += 1
            kept.saver.touch()
            await asyncio.sleep(0.1)
        times = [at - began for at, _ in kept.writes]
        assert len(times) == 3 and all(later - at >= 1.0 for at, later in itertools.pairwise(times))
        kept.number = 77
        await kept.saver.save()
        assert kept.writes[-1] == (pytest.approx(began + 3.5), 77)
        await asyncio.sleep(5)
        assert len(kept.writes) == 4  # nothing changed since
        await kept.saver.close()
        assert json.loads(path.read_text()) == {"number": 77}

    run_virtually(run)


def test_saves_during_a_write_share_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write hangs: the loop continues, and later saves wait for a write of the state of that time."""
    hangs, begun, written = threading.Event(), threading.Event(), []

    def write(store: ChatStore, content: Any) -> None:
        begun.set()
        assert hangs.wait(60)
        written.append(content["number"])

    monkeypatch.setattr(ChatStore, "write", write)

    async def run() -> None:
        number = 1
        saver = ChatSaver(lambda: {"number": number})
        saver.open(path, lambda content: None)
        first = saver.save()
        assert await asyncio.to_thread(begun.wait, 60)
        number = 2
        second, third = saver.save(), saver.save()
        number = 3
        await asyncio.sleep(0)
        assert not first.done() and not second.done()
        hangs.set()
        await asyncio.wait({second, third})
        assert first.done() and written == [1, 3]
        await saver.close()

    asyncio.run(run())


def test_a_failed_write_is_told_until_one_succeeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(loop) -> None:
        kept = Kept(path, monkeypatch)
        kept.fails = True
        await kept.saver.save()
        assert kept.saver.problem == "the disk is full"
        kept.fails = False
        await kept.saver.save()
        assert kept.saver.problem == "" and len(kept.writes) == 1
        defects: list[object] = [object()]  # no JSON
        kept.saver._state = lambda: {"number": defects.pop() if defects else 7}
        first = kept.saver.save()
        await asyncio.sleep(0)  # it is under way
        second = kept.saver.save()
        await asyncio.wait_for(first, 10)
        assert "TypeError" in kept.saver.problem
        await asyncio.wait_for(second, 10)
        assert kept.saver.problem == "" and json.loads(path.read_text()) == {"number": 7}
        await kept.saver.close()

    run_virtually(run)


def test_without_a_store_nothing_is_done() -> None:
    async def run(loop) -> None:
        saver = ChatSaver(lambda: pytest.fail("the state is not needed"))
        saver.touch()
        await saver.save()
        await saver.close()
        assert not saver.keeps and saver.problem == ""

    run_virtually(run)


def test_an_unusable_file_is_set_aside_and_two_stores_are_refused(path: Path) -> None:
    async def run(loop) -> None:
        path.parent.mkdir()
        path.write_text('{"number": 1}')
        saver = ChatSaver(lambda: {})

        def refuse(content: Any) -> None:
            raise StoreError("it is of another target", code="other_target")

        assert saver.open(path, refuse) is None
        (aside,) = path.parent.glob("chat-set-aside-*.json")
        assert "it is of another target" in saver.problem and str(aside) in saver.problem
        assert aside.read_text() == '{"number": 1}'
        with refused("already_stored", StoreError):
            saver.open(path, refuse)
        await saver.close()

    run_virtually(run)
