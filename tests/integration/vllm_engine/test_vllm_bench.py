"""The benchmarks with vLLM behind the verifier: engines compared in text and in speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(paged_target: Path, tmp_path: Path):
    """A program of its own, for vLLM takes more of a process than it gives back. Arguments -> what it prints."""
    questions = tmp_path / "questions.jsonl"
    lines = [{"question_id": number, "category": "qa", "turns": [f"Why {number}?"]} for number in range(3)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(program: str, *more: str) -> dict:
        words = [sys.executable, "-m", program, *more, "--model", str(paged_target), "--questions", str(questions)]
        where = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "tools")}
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **where})
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return run


def test_texts_of_both_engines_are_compared(bench):
    found = bench("compare_texts", "--max-new-tokens", "16", "--threads", "1")
    assert list(found) == ["greedy", "sampled"]
    for each in found.values():
        assert each["questions"] == 3 and each["tokens"] > 3


def test_both_engines_are_measured_in_one_run(bench, paged_drafter, paged_bundle):
    options = ["--sessions", "2", "--seconds", "2", "--repeats", "1", "--modes", "stream,device"]
    options += ["--engine", "transformers,vllm", "--drafter", str(paged_drafter), "--bundle", str(paged_bundle)]
    found = bench("moa_bench.cli", "server", "--json", *options)
    loads = found["sessions"]["2"]
    assert list(loads) == ["transformers stream", "vllm stream", "transformers device", "vllm device"]
    for name, load in loads.items():
        assert load["tokens"] > 0 and load["tokens_per_cpu_s"] > 0, name
    assert found["settings"]["engines"] == ["transformers", "vllm"]
