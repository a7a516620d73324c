"""Files that a benchmark is to write: what is refused before the measurement."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from moa_bench.options import add_question_options, add_timeline_option
from moa_bench.runner import add_output_options, check_outputs
from support.refusals import refused


def check(*argv: object) -> None:
    parser = argparse.ArgumentParser()
    add_question_options(parser, required=False)
    add_timeline_option(parser)
    add_output_options(parser)
    parser.add_argument("--answers", type=Path)
    check_outputs(parser.parse_args(list(map(str, argv))))


@pytest.mark.parametrize("option", ["--timeline", "--plot", "--html"])
@pytest.mark.parametrize("name", ["nowhere/out.svg", "file/out.svg", "folder.svg", "x" * 300 + ".svg", "circle.svg"])
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, option: str, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "circle.svg").symlink_to(tmp_path / "circle.svg")
    with refused("not_writable") as caught:
        check(option, tmp_path / name)
    assert f"{option} {tmp_path / name}" in str(caught.value)


@pytest.mark.parametrize("option", ["--timeline", "--plot", "--html"])
def test_the_file_of_another_option_is_not_lost(tmp_path: Path, option: str) -> None:
    mine, link, fresh = tmp_path / "mine.svg", tmp_path / "link.svg", tmp_path / "fresh.svg"
    mine.write_text("mine")
    link.symlink_to(mine)
    for other in {"--questions", "--answers", "--plot", "--html", "--timeline"} - {option}:
        with refused("same_file") as caught:
            check(option, link, other, mine)
        assert option in str(caught.value) and other in str(caught.value)
    assert mine.read_text() == "mine"
    with refused("same_file"):
        check(option, fresh, "--answers", fresh)


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "held").write_text("held")
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    for name in ("held", "fresh", "dangling"):
        check("--timeline", tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"held", "dangling"}
    assert (tmp_path / "held").read_text() == "held" and not (tmp_path / "dangling").exists()
