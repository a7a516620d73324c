"""The figures of the vectors are those that Python computes."""

from __future__ import annotations

from vectors import trace_files
from vectors.figures import figures_of
from vectors.loop_replay import alike


def test_python_computes_what_the_vectors_say() -> None:
    for name, cases in figures_of().items():
        said = list(trace_files.read(f"figures/{name}"))
        assert len(said) == len(cases)
        for number, (case, expected) in enumerate(zip(cases, said, strict=True)):
            assert alike(case, expected), f"{name}, case {number}: expected {expected}, got {case}"


def test_the_placements_change() -> None:
    """Both ways, and again after pauses, or the vectors would say little."""
    cases = list(trace_files.read("figures/placements"))
    turns = [sum(a[2][0] != b[2][0] for a, b in zip(case["told"], case["told"][1:], strict=False)) for case in cases]
    trials = [told[2][1] for case in cases for told in case["told"]]
    assert sum(turn >= 2 for turn in turns) >= 10 and 0.05 < sum(trials) / len(trials) < 0.95
