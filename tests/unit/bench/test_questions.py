"""Reading questions in the format of Spec-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa_bench.questions import MT_BENCH_CATEGORIES, Question, QuestionsError, read_questions
from support.refusals import refused


def line(identity: int | str = 81, category: str = "qa", turns: object = ("Why?",), **more: object) -> str:
    return json.dumps({"question_id": identity, "category": category, "turns": turns, **more})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_turns_and_tasks_are_read_up_to_the_limit(tmp_path):
    path = write(tmp_path, line(7, "rag", ["Größe?", "And now?"], reference=["x"]), "", line("b", "qa"), "broken")
    assert read_questions(path, 2) == [Question(7, "rag", ("Größe?", "And now?")), Question("b", "qa", ("Why?",))]
    assert len(read_questions(write(tmp_path, line(1)), 5)) == 1
    path = write(tmp_path, *(line(n, category) for n, category in enumerate(sorted(MT_BENCH_CATEGORIES))))
    assert [question.task for question in read_questions(path)] == ["mt_bench"] * 8


@pytest.mark.parametrize(
    ("bad", "code", "named"),
    [
        ('{"question_id": 1,', "not_json", "column"),
        ("[1]", "no_question", "turns"),
        ('{"category": "qa", "turns": ["a"]}', "no_question", "'question_id'"),
        ('{"question_id": 1, "turns": ["a"]}', "no_question", "'category'"),
        ('{"question_id": 1, "category": "qa"}', "no_question", "'turns'"),
        (line(turns="a"), "no_question", "'turns'"),
        (line(turns=[]), "no_question", "'turns'"),
        (line(turns=["a", 3]), "no_question", "'turns'"),
        (line(category=""), "no_question", "'category'"),
        ("[" * 100_000, "no_question", ""),
        (line(turns=["\ud800"]), "no_question", ""),
        ('{"question_id": null, "category": "qa", "turns": ["a"]}', "no_question", "'question_id'"),
    ],
)
def test_a_broken_line_is_named_by_number(tmp_path, bad, code, named):
    path = write(tmp_path, line(1), "", bad)
    with refused(code, QuestionsError) as caught:
        read_questions(path)
    assert f"line 3 of {path}" in str(caught.value) and named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "code"), [("none", "not_readable"), (".", "not_readable"), ("empty", "empty"), ("binary", "not_utf8")]
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, code):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with refused(code, QuestionsError):
        read_questions(tmp_path / name)
