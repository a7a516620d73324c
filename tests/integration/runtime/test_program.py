"""Ends of command lines: an error with its code for what the system refuses, and an exit status."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_bench.cli import main as moa_bench
from moa_chat.cli import main as moa_chat
from moa_drafter.cli import main as moa_train
from moa_export.cli import main as moa_export
from moa_export.errors import ParityError
from moa_runtime.cli_main import own_program, run_program
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


def test_errors_end_a_program_with_a_code_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/secret")
    refused: list[tuple[Callable[[], object], str, str]] = [
        (lambda: (tmp_path / "none").read_text(), "path_refused", f"{tmp_path}/none"),
        (lambda: (tmp_path / "file" / "in").read_text(), "path_refused", f"{tmp_path}/file/in"),
        (lambda: tmp_path.joinpath(LONG).exists(), "path_refused", LONG),
        (lambda: tmp_path.write_text(""), "path_refused", f"{tmp_path}"),
        (refuse(denied), "path_refused", "/secret"),
        (refuse(MoaError("wrong", code="wrong_word")), "wrong_word", "prog: error: wrong"),
        (refuse(MoaError("peer: \x1b[2J\x9b\n2", code="wrong_word")), "wrong_word", "peer: \\x1b[2J\\x9b\\n2"),
    ]
    for work, code, named in refused:
        assert ended(work) == 2
        said = capsys.readouterr().err
        assert said.endswith(f"[{code}]\n") and named in said
    assert ended(refuse(ParityError("too far", code="parity"))) == 1


def test_other_ends(capsys: pytest.CaptureFixture[str]) -> None:
    complaints: list[str] = []
    assert run_program("prog", lambda: 7) == 7
    assert run_program("prog", refuse(KeyboardInterrupt()), stopped="go on with it") == 130  # type: ignore[arg-type]
    assert capsys.readouterr().err == "prog: go on with it\n"
    wrong = refuse(MoaError("wrong", code="wrong_word"))
    assert run_program("prog", wrong, complain=complaints.append) == 2  # type: ignore[arg-type]
    assert complaints == ["wrong  [wrong_word]"] and capsys.readouterr().err == ""
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
def test_names_that_no_system_takes(main, words, onnx_bundle, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(onnx_bundle))
    assert main(words) == 2
    *before, said = capfd.readouterr().err.splitlines()
    assert LONG in said and "Traceback" not in said and not [line for line in before if not line.endswith(" s gone)")]
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_a_program_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(own_program("early"), cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
