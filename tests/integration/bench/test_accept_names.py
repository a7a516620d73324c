"""``moa-bench accept`` with drafters that are called by name."""

from __future__ import annotations

import json

import pytest

from moa_bench.cli import main
from moa_runtime.paths import bundle_of_drafter
from support.tiny import make_tiny_bundle

NAMES = ["moa", "sssd", "early-exit", "independent"]


@pytest.fixture
def accept(tiny_target, tiny_shipped, questions, capsys):
    """Runs it on the tiny target."""

    def run(*more: str) -> tuple[int, str, str]:
        where = ["--questions", str(questions), "--limit", "1", "--model", str(tiny_target)]
        return main(["accept", *where, "--max-new-tokens", "12", *more]), *capsys.readouterr()

    return run


def test_one_command_compares_all_that_have_a_name(accept):
    status, out, _ = accept("--against", *NAMES, "--json")
    found = json.loads(out)
    measured = [found, *found["rivals"]]
    assert status == 0 and [one["name"] for one in measured] == NAMES, "the default one is there once"
    architectures = ["moa", "sssd", "early-exit", "independent"]
    assert [one["architecture"] for one in measured] == architectures
    assert [name for name, one in zip(NAMES, measured, strict=True) if one["weights"] == "none"] == ["sssd"]
    assert [one["row_bytes"] > 0 for one in measured] == [True, False, False, False]
    for one in measured:
        assert one["tokens"] == found["tokens"] and one["questions"] == 1


def test_the_first_one_is_chosen_by_name_too(accept):
    found = json.loads(accept("--drafter", "early-exit", "--against", "moa", "--json")[1])
    assert [found["name"], *(one["name"] for one in found["rivals"])] == ["early-exit", "moa"]


def test_a_name_that_is_not_shipped_ends_the_command(accept, monkeypatch, tmp_path):
    monkeypatch.setattr("moa_drafter.pretrained.WEIGHTS", tmp_path)
    (tmp_path / "moa").mkdir()
    (tmp_path / "moa" / "config.json").touch()
    status, out, err = accept("--against", "sssd", "independent")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "there are no weights of a drafter independent: shipped are moa" in err
    assert "[unknown_drafter]" in accept("--against", "larn")[2]


def test_a_name_chooses_the_bundle_where_none_is_given(
    tiny_target, tiny_shipped, questions, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    where = ["--questions", str(questions), "--limit", "1", "--model", str(tiny_target), "--drafter", "early-exit"]
    command = ["offline", *where, "--after", "2", "--lengths", "4", "--json"]
    assert main(command) == 2
    path = bundle_of_drafter("early-exit")
    assert f"there is no bundle at {path}: `moa-export --target onnx --drafter early-exit" in capsys.readouterr().err
    make_tiny_bundle(path, tiny_target, tiny_shipped / "early-exit", "none", questions=())
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["target"]
