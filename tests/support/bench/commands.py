"""``moa-bench`` as tests run it, and what it says of bad input."""

from __future__ import annotations

from support.said import is_progress

Run = tuple[int, str, str]  # exit status, stdout, stderr


def refusal(run: Run, code: str | None = None) -> str:
    """Check that a command refused its input in one line, perhaps after its progress; returns the line."""
    status, out, err = run
    *before, said = err.splitlines()
    assert (status, out) == (2, "") and all(map(is_progress, before)), err
    assert said.startswith("moa-bench: error: ") and (code is None or said.endswith(f"[{code}]")), said
    return said
