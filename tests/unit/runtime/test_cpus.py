"""Commands with a number of threads warn if there are fewer processors."""

from __future__ import annotations

import logging

import pytest

from moa_bench.cli import main as bench
from moa_runtime import options as choices
from moa_runtime.errors import MoaError
from moa_server.engine.load import load_engine
from moa_server.settings import parser


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "available_cpus", lambda: 2)


def test_only_more_threads_than_processors_are_too_many():
    assert [choices.too_many_threads(count) for count in (None, 1, 2)] == [None] * 3
    warning = choices.too_many_threads(3)
    assert warning and warning.startswith("3 ") and warning.partition("--threads 2")[1]


def test_a_benchmark_warns_and_continues(capsys):
    assert bench(["network", "--threads", "999", "--max-new-tokens", "0"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert choices.too_many_threads(999) in first and "--max-new-tokens" in second


def test_a_verifier_warns_in_its_log_and_continues(caplog):
    options = parser().parse_args(["--threads", "999", "--device", "abacus"])
    with caplog.at_level(logging.WARNING), pytest.raises(MoaError, match="'abacus'"):
        load_engine(options)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("moa")]
    assert logged == [choices.too_many_threads(999)]
