"""Every error has a code; its sentence stands in ``tests/golden`` and in no other test."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from moa_runtime.transport import ConnectError
from support.sentences import (
    GOLDEN,
    PACKAGES,
    REPOSITORY,
    error_classes,
    errors_of,
    golden,
    repeated,
    said_by,
    sources,
)

TESTS = REPOSITORY / "tests"


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[Path, ast.Module]]:
    return sources()


@pytest.fixture(scope="module")
def classes(parsed) -> set[str]:
    return error_classes(parsed)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_error_has_a_code(parsed, classes, package):
    without = [
        f"{path.relative_to(REPOSITORY)}:{line}: {sentence}"
        for path, tree in parsed[package].items()
        for line, code, sentence in errors_of(tree, classes)
        if not code
    ]
    assert not without, "\n".join(without)


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_are_those_of_the_golden_file(parsed, classes, package):
    """After a change: ``PYTHONPATH=tests python -m support.sentences``, then read its diff as a user would."""
    assert (GOLDEN / f"{package}.txt").read_text("utf-8") == golden(parsed[package], classes)


def test_an_error_crosses_processes_with_all_that_it_has():
    error = pickle.loads(pickle.dumps(ConnectError("gone", final=True, code="unreachable")))
    assert (type(error), str(error), error.code, error.final) == (ConnectError, "gone", "unreachable", True)


def test_no_test_repeats_a_sentence(parsed):
    said = "\x00".join(said_by(files) for files in parsed.values())
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {words}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, words in repeated(ast.parse(path.read_text("utf-8")), said)
    ]
    assert not found, "\n".join(found)
