"""Questions as of work that repeats itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa_bench.cli import main
from moa_bench.questions import read_questions
from moa_bench.related.groups import groups_of

TEXTS = [letter * 300 for letter in "abc"]


def written(folder: Path, prompts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_prompts_with_the_same_long_line_belong_together() -> None:
    prompts = [f"{TEXTS[0]}\nWhy?", "Why?", f"How?\n{TEXTS[0]}", f"{TEXTS[1]}\nWhy?", f"{TEXTS[0]}\nWhy?", "x" * 299]
    assert list(groups_of(prompts)) == [[prompts[0], prompts[2]], [prompts[3]]]


def test_half_of_what_is_asked_of_each_text_is_asked_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, [f"{text}\nQuestion {number}?" for number in range(5) for text in TEXTS])
    words = ["related", str(path), "--out", str(tmp_path / "out"), "--texts", "3", "--each", "4"]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    earlier, later = (read_questions(tmp_path / "out" / f"{name}.jsonl") for name in ("earlier", "later"))
    assert (said["texts"], said["earlier"], said["later"]) == (3, 6, 6) == (3, len(earlier), len(later))
    asked = [{question.turns[0] for question in questions} for questions in (earlier, later)]
    assert not asked[0] & asked[1]
    for questions in (earlier, later):
        assert [question.task for question in questions] == ["text 1", "text 2", "text 3"] * 2
        assert len({question.turns[0].splitlines()[0] for question in questions[:3]}) == 3
    content = [(tmp_path / "out" / f"{name}.jsonl").read_text() for name in ("earlier", "later")]
    assert main(words) == 0 and "6 earlier and 6 later questions about 3 texts" in capsys.readouterr().out
    assert content == [(tmp_path / "out" / f"{name}.jsonl").read_text() for name in ("earlier", "later")]


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [f"{text}\nQuestion {number}?" for number in range(5) for text in TEXTS])
    for name in ("earlier.jsonl", "later.jsonl"):
        mine = path.rename(tmp_path / name)
        content = mine.read_bytes()
        assert main(["related", str(mine), "--out", str(tmp_path), "--texts", "3", "--each", "4"]) == 2
        assert f"{mine} is there already and holds something else" in capsys.readouterr().err
        assert mine.read_bytes() == content and len(list(tmp_path.iterdir())) == 1
        path = mine.rename(path)
    assert main(["related", str(path), "--out", str(path), "--texts", "3", "--each", "4"]) == 2
    assert "a part of the name is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--texts", "4", "--each", "2"], "has 3 texts with 2 questions each, not 4"),
        (["--texts", "0"], "--texts must be at least 1"),
        (["--each", "1"], "--each must be at least 2"),
    ],
)
def test_what_cannot_be_made_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    path = written(tmp_path, [f"{text}\nQuestion {number}?" for number in range(2) for text in TEXTS])
    assert main(["related", str(path), "--out", str(tmp_path / "out"), *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["related", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
