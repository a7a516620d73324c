"""``tools/plot_runs.py``: what it reads of training runs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plot_runs import main


def write_log(folder: Path, taus: list[float]) -> Path:
    folder.mkdir()
    entries = [
        {"step": 10 * n, "tokens": 1000 * n, "loss": 4.0 - tau, "tau": tau, "accuracy_by_depth": [tau - 1, None]}
        for n, tau in enumerate(taus, 1)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def test_runs_are_named_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moa, eagle = write_log(tmp_path / "moa", [1.25, 1.5]), write_log(tmp_path / "other", [1.125])
    plot = tmp_path / "curve.svg"
    arguments = [str(moa), f"eagle={eagle / 'log.jsonl'}", "--plot", str(plot)]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["runs"]) == ["moa", "eagle"]
    assert [(entry["tokens"], entry["tau"]) for entry in result["runs"]["moa"]] == [(1000, 1.25), (2000, 1.5)]
    drawn = plot.read_text()
    assert drawn.lstrip().startswith("<?xml") and "line2d" in drawn
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "moa     " in table and "1.500" in table and "1.125" in table


def test_runs_without_loss_have_no_panel_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, plot = tmp_path / "run", tmp_path / "curve.svg"
    folder.mkdir()
    _broken(folder, '{"tokens": 1000, "tau": 2.5, "accuracy_by_depth": [0.5]}\n')
    assert main([str(folder), "--json", "--plot", str(plot)]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["run"][0]["loss"] is None
    assert "<!-- tau -->" in plot.read_text() and "<!-- loss (nats) -->" not in plot.read_text()

    both = write_log(tmp_path / "both", [1.5])
    assert main([str(folder), str(both), "--plot", str(plot)]) == 0
    assert "<!-- loss (nats) -->" in plot.read_text()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder / "nowhere", "cannot read"),
        (lambda folder: _broken(folder, ""), "holds no evaluation yet"),
        (lambda folder: _broken(folder, '{"tokens": 1}\n'), "line 1: expected an evaluation"),
        (lambda folder: _broken(folder, "7\n"), "line 1: expected an evaluation"),
    ],
)
def test_what_cannot_be_read(make, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make(tmp_path))]) == 2
    message = capsys.readouterr().err
    assert expected in message and "Traceback" not in message and message.count("\n") == 1


def _broken(folder: Path, text: str) -> Path:
    (folder / "log.jsonl").write_text(text)
    return folder
