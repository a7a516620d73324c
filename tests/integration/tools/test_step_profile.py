"""``tools/step_profile.py``: profiles against traces worked out by hand, and the command."""

from __future__ import annotations

import json

import pytest

from step_profile import main, parse_profile


def trace_of_run(start: int, duration: int, **kernels: int) -> list[dict]:
    """Events as onnxruntime writes them: the operators of a run before the run itself."""
    events = []
    for offset, (name, microseconds) in enumerate(kernels.items(), 1):
        args = {"op_name": name.split("_")[0]}
        event = {"cat": "Node", "name": f"{name}_kernel_time", "ts": start + offset, "dur": microseconds, "args": args}
        events.append(event)
    return [*events, {"cat": "Session", "name": "model_run", "ts": start, "dur": duration, "args": {}}]


def test_a_profile_is_the_mean_over_the_faster_half_of_the_last_runs():
    events = [
        *trace_of_run(0, 9_000, MatMul_0=8_000),  # warming up
        *trace_of_run(10_000, 2_000, MatMul_0=1_000, Add_0=300, MatMul_1=400),
        *trace_of_run(20_000, 8_000, MatMul_0=1_000, Add_0=6_000, MatMul_1=400),  # disturbed
        *trace_of_run(30_000, 9_000, MatMul_0=7_000, Add_0=300, MatMul_1=400),  # disturbed
        *trace_of_run(40_000, 4_000, MatMul_0=2_000, Add_0=500, MatMul_1=800),
    ]
    profile = parse_profile(events, 4)
    assert profile.step_ms == pytest.approx(3.0)
    assert [node.name for node in profile.nodes] == ["MatMul_0", "Add_0", "MatMul_1"]
    assert [node.op for node in profile.nodes] == ["MatMul", "Add", "MatMul"]
    assert [node.ms for node in profile.nodes] == pytest.approx([1.5, 0.4, 0.6])
    figures = profile.as_dict()
    assert figures["between_nodes_ms"] == 0.5
    assert figures["operators"] == [
        {"op": "MatMul", "nodes": 2, "ms": 2.1, "share": 0.7},
        {"op": "Add", "nodes": 1, "ms": 0.4, "share": 0.1333},
    ]
    assert [node["name"] for node in figures["top_nodes"]] == ["MatMul_0", "MatMul_1", "Add_0"]


def test_operators_of_a_step_are_shown(onnx_bundle, capsys):
    words = ["--bundle", str(onnx_bundle), "--threads", "1", "--context", "16", "--tokens", "8", "--repeats", "2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    spent = sum(operator["ms"] for operator in found["operators"])
    assert spent + found["between_nodes_ms"] == pytest.approx(found["step_ms"], abs=0.01)
    assert any(operator["op"] == "MatMulNBits" for operator in found["operators"])
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "between operators" in shown and "most expensive nodes" in shown
