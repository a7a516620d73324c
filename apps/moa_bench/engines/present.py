"""Tables of a comparison of engines."""

from __future__ import annotations

from typing import Any

from moa_bench.table import Table


def tables(result: dict[str, Any]) -> list[Table]:
    """What the terminal shows."""
    found = result["samplings"]
    rows = [
        [name, each["questions"], each["tokens"], len(each["places"]), each["beyond_rounding"]]
        for name, each in found.items()
    ]
    places = [
        [name, place["question"], place["position"], place["expected"], place["found"], place["nearness"]]
        for name, each in found.items()
        for place in each["places"]
    ]
    header = ["choices", "question", "token", "transformers", "vllm", "chosen once logits change by"]
    listed = [[*row[:-1], "-" if row[-1] is None else f"{row[-1]:g}"] for row in places]
    return [
        Table(["choices", "questions", "tokens", "differing", "beyond rounding"], rows),
        *([Table(header, listed, title="Where they differ")] if listed else []),
    ]
