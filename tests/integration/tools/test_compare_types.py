"""``tools/compare_types.py``: a tiny target in 8 bits beside float32, and the command."""

from __future__ import annotations

import json
from pathlib import Path

from compare_types import main


def test_types_are_compared_with_float32(tiny_target: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    options = ["--model", str(tiny_target), "--limit", "2", "--max-new-tokens", "8"]
    assert main([*options, "--types", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 2 and 2 <= found["tokens"] <= 16
    assert 0.5 < found["int8"]["perplexity_ratio"] < 2 and 0 <= found["int8"]["equal_answers"] <= 1
    assert found["int8"]["equal_tokens"] >= found["int8"]["equal_answers"]
    assert main([*options, "--types", "int2"]) != 0 and "unknown_type" in capsys.readouterr().err
