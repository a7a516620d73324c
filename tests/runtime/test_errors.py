"""What the system refuses about a path is a sentence, in every command line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_bench.cli import main as moa_bench
from moa_chat.cli import main as moa_chat
from moa_drafter.cli import main as moa_train
from moa_export.cli import main as moa_export
from moa_runtime.errors import MoaError, refused_paths
from moa_server.cli import main as moa_serve

LONG = "x" * 300


def test_the_path_and_the_reason_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: (tmp_path / "none").read_text(), "none cannot be used: there is no such file or folder; give another"),
        (lambda: (tmp_path / "file" / "in").read_text(), "in cannot be used: a part of the name is a file, not a fol"),
        (lambda: tmp_path.joinpath(LONG).exists(), f"{LONG} cannot be used: file name too long"),
        (lambda: tmp_path.write_text(""), "cannot be used: it is a folder, not a file"),
    ]
    for refuse, said in refused:
        with pytest.raises(MoaError, match=said), refused_paths():
            refuse()
    with pytest.raises(MoaError, match="/secret cannot be used: permission denied"), refused_paths():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/secret")


def test_what_names_no_path_is_not_hidden() -> None:
    for fault in (BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.EIO, "Input/output error"), ValueError()):
        with pytest.raises(type(fault)), refused_paths():
            raise fault


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (moa_chat, ["--once", "x", "--bundle", LONG]),
        (moa_chat, ["--terminal", "--chat", f"{LONG}/chat.json"]),
        (moa_bench, ["accept", "--questions", LONG]),
        (moa_bench, ["accept", "--questions", __file__, "--timeline", LONG]),
        (moa_export, ["inspect", LONG]),
        (moa_export, ["datastore", LONG]),
        (moa_train, ["--out", LONG]),
        (moa_train, ["--out", "run", "--data", LONG]),
        (moa_train, ["--out", "run", "--config", LONG]),
        (moa_serve, ["--drafter", f"./{LONG}"]),
        (moa_serve, ["--model", LONG]),
        (moa_serve, ["--token-file", LONG]),
    ],
)
def test_names_that_no_system_takes(
    main: Callable[[list[str]], int],
    words: list[str],
    onnx_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(onnx_bundle))
    assert main(words) == 2
    said = capfd.readouterr().err
    assert LONG in said and "Traceback" not in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
