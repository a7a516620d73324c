"""How command lines end: a sentence for what the system refuses, and an exit status."""

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
from moa_export.errors import ParityError
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError
from moa_server.cli import main as moa_serve

LONG = "x" * 300


def ended(work: Callable[[], object]) -> int:
    def run() -> int:
        work()
        return 0

    return run_program("prog", run)


def refuse(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_the_path_and_the_reason_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/secret")
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: (tmp_path / "none").read_text(), "none cannot be used: there is no such file or folder; give another"),
        (lambda: (tmp_path / "file" / "in").read_text(), "in cannot be used: a part of the name is a file, not a fol"),
        (lambda: tmp_path.joinpath(LONG).exists(), f"{LONG} cannot be used: file name too long"),
        (lambda: tmp_path.write_text(""), "cannot be used: it is a folder, not a file"),
        (refuse(denied), "prog: error: /secret cannot be used: permission denied"),
        (refuse(MoaError("it is wrong")), "prog: error: it is wrong"),
    ]
    for work, said in refused:
        assert ended(work) == 2
        assert said in capsys.readouterr().err
    assert ended(refuse(ParityError("too far"))) == 1


def test_other_ends(capsys: pytest.CaptureFixture[str]) -> None:
    complaints: list[str] = []
    assert run_program("prog", lambda: 7) == 7
    assert run_program("prog", refuse(KeyboardInterrupt()), stopped="go on with it") == 130  # type: ignore[arg-type]
    assert capsys.readouterr().err == "prog: go on with it\n"
    assert run_program("prog", refuse(MoaError("wrong")), complain=complaints.append) == 2  # type: ignore[arg-type]
    assert complaints == ["wrong"] and capsys.readouterr().err == ""
    for fault in (OSError(errno.EIO, "Input/output error"), ValueError(), SystemExit(3)):
        with pytest.raises(type(fault)):
            ended(refuse(fault))


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
    *before, said = capfd.readouterr().err.splitlines()
    assert LONG in said and "Traceback" not in said and not [line for line in before if not line.endswith(" s gone)")]
    assert not list(tmp_path.iterdir())
