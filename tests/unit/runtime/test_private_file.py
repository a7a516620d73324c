"""Files that are whole or not there: several programs at once, killed ones, full disks, names of the user's."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from moa_runtime import atomic_file as private_file
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
def test_threads_wait_for_each_other_too(tmp_path: Path) -> None:
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
    assert names(tmp_path) <= {"file"}
    replace_private(path, [b"next"])
    assert path.read_bytes() == b"next" and names(tmp_path) == {"file"}


@posix
def test_a_writer_that_stands_still_is_not_waited_for_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    writer, go = half_written(path)
    monkeypatch.setattr(private_file, "_WAIT_S", 0.1)
    for wait in (lambda: replace_private(path, [b"text"]), lambda: remove_private(path)):
        with pytest.raises(TimeoutError, match="another program is writing it"):
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


def test_what_fails_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_private(path, [b"before"])

    def parts():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_private(path, parts())
    assert path.read_bytes() == b"before" and names(tmp_path) == {"file"}


def test_no_file_of_the_users_is_in_the_way(tmp_path: Path) -> None:
    for name in ("file.new", "file.tmp", "file.lock"):
        (tmp_path / name).write_text("mine")
    replace_private(tmp_path / "file", [b"text"])
    remove_private(tmp_path / "file")
    remove_private(tmp_path / "file")
    assert names(tmp_path) == {"file.new", "file.tmp", "file.lock"}
    assert all(each.read_text() == "mine" for each in tmp_path.iterdir())


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    replace_private(tmp_path / "file", [b"text"])
    if sys.platform != "win32":
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
