"""Reading questions in the format of Spec-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa_bench.questions import MT_BENCH_CATEGORIES, Question, QuestionsError, read_questions


def line(identity: int | str = 81, category: str = "qa", turns: object = ("Why?",), **more: object) -> str:
    return json.dumps({"question_id": identity, "category": category, "turns": turns, **more})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_reads_turns_and_task(tmp_path):
    path = write(tmp_path, line(7, "rag", ["Größe?", "And now?"], reference=["x"]), "", line("b", "qa"))
    assert read_questions(path) == [Question(7, "rag", ("Größe?", "And now?")), Question("b", "qa", ("Why?",))]


def test_the_eight_categories_of_mt_bench_are_one_task(tmp_path):
    path = write(tmp_path, *(line(n, category) for n, category in enumerate(sorted(MT_BENCH_CATEGORIES))))
    assert [question.task for question in read_questions(path)] == ["mt_bench"] * 8


def test_limit_takes_the_first_and_reads_no_further(tmp_path):
    path = write(tmp_path, line(1), line(2), "broken")
    assert [question.id for question in read_questions(path, 2)] == [1, 2]
    assert len(read_questions(write(tmp_path, line(1)), 5)) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"question_id": 1,', "line 3 of {path} is no JSON: "),
        ("[1]", "line 3 of {path} is no question: expected a JSON object"),
        ('{"category": "qa", "turns": ["a"]}', "it has no 'question_id'"),
        ('{"question_id": 1, "turns": ["a"]}', "it has no 'category'"),
        ('{"question_id": 1, "category": "qa"}', "it has no 'turns'"),
        (line(turns="a"), "'turns' must be a list of texts"),
        (line(turns=[]), "'turns' must be a list of texts"),
        (line(turns=["a", 3]), "'turns' must be a list of texts"),
        (line(category=""), "'category' must be a text"),
        ("[" * 100_000, "line 3 of {path} is no question: it is nested too deeply"),
        ('{"question_id": null, "category": "qa", "turns": ["a"]}', "'question_id' must be"),
    ],
)
def test_a_broken_line_is_named_by_number(tmp_path, bad, said):
    path = write(tmp_path, line(1), "", bad)
    with pytest.raises(QuestionsError) as caught:
        read_questions(path)
    assert said.format(path=path) in str(caught.value)
    assert "line 3 of" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(QuestionsError, match="No such file"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(QuestionsError, match="Is a directory"):
        read_questions(tmp_path)
    with pytest.raises(QuestionsError, match="holds no questions"):
        read_questions(write(tmp_path, ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuestionsError, match="no UTF-8"):
        read_questions(tmp_path / "binary")
