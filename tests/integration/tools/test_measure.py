"""``tools/measure_steps.py`` and ``tools/measure_equality.py`` on a tiny random target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import measure_equality
import measure_steps
from measure_equality import plain_answers, verify_drafts
from moa_server.engine.torch_engine import torch_engine
from random_target import random_target


def test_each_part_has_figures(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    arguments = "--sessions 1,2 --rows 1,2 --context 20 --prompts 9 --product-rows 4 --repeats 1"
    assert measure_steps.main([*arguments.split(), "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    parts = {row["part"] for row in rows}
    assert parts >= {"bare without a graph", "products", "fused", "general", "prefill", "drafter", "memory rows"}
    timed = [(row["sessions"], row["rows"]) for row in rows if row["part"] == "fused"]
    assert timed == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows if "min_ms" in row)


def test_drafts_write_the_plain_text_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "equality.jsonl"
    arguments = "--shape tiny --pass fused --limit 2 --max-new-tokens 8"
    assert measure_equality.main([*arguments.split(), "--json", str(file)]) == 0
    bits, compared = (json.loads(line) for line in file.read_text().splitlines())
    assert all(
        sorted(itertools.chain.from_iterable(groups)) == list(measure_equality._ROWS)
        for groups in bits["same_bits"].values()
    )
    assert compared["beside_1"]["tokens"] == compared["beside_8"]["tokens"] == 16
    assert compared["beside_1"]["differing_tokens"] == compared["beside_8"]["differing_tokens"] == 0


@pytest.mark.parametrize("beside", [1, 2])
def test_a_token_that_differs_is_found(beside: int) -> None:
    engine = torch_engine(random_target("tiny", "cpu", torch.float32), max_context=64)
    answers = plain_answers(engine, [[5, 6, 7], [8, 9]], 6)
    answers[1].expected[4] = (answers[1].expected[4] + 1) % 512
    places = verify_drafts(engine, answers, beside)
    engine.close()
    assert (places[0].answer, places[0].position) == (1, 4)
    assert places[0].gap < 0  # the engine's own choice has the larger logit
