"""Files that are written completely or not at all: several threads at once, full disks, the user's own files."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from moa_runtime.atomic_file import remove_private, replace_private

posix = pytest.mark.skipif(sys.platform == "win32", reason="kills, and files that are replaced while they are read")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def half_written(path: Path) -> tuple[threading.Thread, threading.Event]:
    """A thread that writes ``slow`` and is in the middle of it until the event is set."""
    begun, go = threading.Event(), threading.Event()

    def parts():
        yield b"sl"
        begun.set()
        go.wait(10)
        yield b"ow"

    thread = threading.Thread(target=replace_private, args=(path, parts()))
    thread.start()
    assert begun.wait(10)
    return thread, go


@posix
def test_writing_waits_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first, go = half_written(path)
    second = threading.Thread(target=replace_private, args=(path, [b"fast"]))
    second.start()
    second.join(0.2)
    assert second.is_alive() and not path.exists()
    go.set()
    first.join(10)
    second.join(10)
    assert path.read_bytes() == b"fast" and names(tmp_path) == {"file"}


@posix
def test_deleting_waits_for_a_writer(tmp_path: Path) -> None:
    """Else the file that the next writer begins would get the name when the first one is done."""
    path = tmp_path / "file"
    writer, go = half_written(path)
    deleter = threading.Thread(target=remove_private, args=(path,))
    deleter.start()
    deleter.join(0.2)
    assert deleter.is_alive()
    go.set()
    writer.join(10)
    deleter.join(10)
    replace_private(path, [b"next"])
    assert path.read_bytes() == b"next" and names(tmp_path) == {"file"}


@posix
def test_a_writer_that_hangs_is_not_waited_for_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    writer, go = half_written(path)
    monkeypatch.setattr("moa_runtime.atomic_file._WAIT_S", 0.1)
    for wait in (lambda: replace_private(path, [b"text"]), lambda: remove_private(path)):
        with pytest.raises(TimeoutError):
            wait()
    go.set()
    writer.join(10)
    assert path.read_bytes() == b"slow" and names(tmp_path) == {"file"}


@posix
def test_a_link_is_followed_and_a_folder_in_the_way_named(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    replace_private(link, [b"text"])
    assert link.is_symlink() and real.read_bytes() == b"text"
    (tmp_path / ".real.unfinished").mkdir()
    with pytest.raises(IsADirectoryError, match="unfinished"):
        replace_private(real, [b"next"])
    assert real.read_bytes() == b"text"
    with pytest.raises(IsADirectoryError, match="unfinished"):
        remove_private(real)
    assert not real.exists()


def test_an_error_in_the_middle_leaves_the_old_content_and_no_file_of_the_user_is_touched(tmp_path: Path) -> None:
    path, others = tmp_path / "file", {"file.new", "file.tmp", "file.lock"}
    for name in others:
        (tmp_path / name).write_text("mine")
    replace_private(path, [b"before"])
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600

    def parts():
        yield b"half"
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        replace_private(path, parts())
    assert path.read_bytes() == b"before" and names(tmp_path) == {"file", *others}
    remove_private(path)
    remove_private(path)
    assert names(tmp_path) == others
    assert all(each.read_text() == "mine" for each in tmp_path.iterdir())
