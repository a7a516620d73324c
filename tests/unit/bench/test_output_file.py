"""Files that a benchmark is to write: what is refused before the measurement."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from moa_bench.options import add_question_options, add_timeline_option
from moa_bench.runner import add_output_options, check_output_file
from moa_runtime.errors import MoaError


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_question_options(parser, required=False)
    add_timeline_option(parser)
    add_output_options(parser)
    parser.add_argument("--answers", type=Path)
    return parser.parse_args(argv)


@pytest.mark.parametrize("option", ["timeline", "plot", "html"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/out.svg", "there is no such file or folder"),
        ("file/out.svg", "a part of the name is a file, not a folder"),
        (".", "it is a folder, not a file"),
        ("x" * 300, "file name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, option: str, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoaError, match=f"--{option} .* cannot be written: {said}"):
        check_output_file(option, parsed(f"--{option}", str(tmp_path / name)))


@pytest.mark.parametrize("option", ["timeline", "plot", "html"])
def test_the_file_of_another_option_is_not_lost(tmp_path: Path, option: str) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.write_text("mine")
    link.symlink_to(mine)
    for other in {"questions", "answers", "plot", "html", "timeline"} - {option}:
        with pytest.raises(MoaError, match=f"--{option} .* is the file of --{other}, which would be lost"):
            check_output_file(option, parsed(f"--{option}", str(link), f"--{other}", str(mine)))
    assert mine.read_text() == "mine"
    fresh = str(tmp_path / "fresh")
    with pytest.raises(MoaError, match="is the file of --answers"):
        check_output_file(option, parsed(f"--{option}", fresh, "--answers", fresh))


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "held").write_text("held")
    check_output_file("timeline", parsed())
    for name in ("held", "fresh"):
        check_output_file("timeline", parsed("--timeline", str(tmp_path / name)))
    assert [path.name for path in tmp_path.iterdir()] == ["held"] and (tmp_path / "held").read_text() == "held"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "later")
    check_output_file("timeline", parsed("--timeline", str(dangling)))
    assert dangling.is_symlink() and not dangling.exists()
