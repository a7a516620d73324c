"""More threads than processors are warned of in one sentence, by every command that takes a number of them."""

from __future__ import annotations

import logging

import pytest

from moa_bench.cli import main as bench
from moa_runtime import options as choices
from moa_runtime.errors import MoaError
from moa_server.engine.load import load_engine
from moa_server.settings import parser


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors."""
    monkeypatch.setattr(choices, "available_cpus", lambda: 2)


def test_as_many_as_there_are_is_no_matter():
    assert [choices.too_many_threads(count) for count in (None, 1, 2)] == [None] * 3
    assert choices.too_many_threads(3) == (
        "3 threads on the 2 processors that this process may use wait for each other: --threads 2 is quicker"
    )


def test_a_benchmark_says_so_and_goes_on(capsys):
    assert bench(["network", "--threads", "999", "--max-new-tokens", "0"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("moa-bench: 999 threads on the 2 processors") and "--max-new-tokens must be" in second


def test_a_verifier_says_so_in_its_log_and_goes_on(caplog):
    options = parser().parse_args(["--threads", "999", "--device", "abacus"])
    with caplog.at_level(logging.WARNING), pytest.raises(MoaError, match="no torch device 'abacus'"):
        load_engine(options)
    assert [record.getMessage()[:11] for record in caplog.records if record.name.startswith("moa")] == ["999 threads"]
