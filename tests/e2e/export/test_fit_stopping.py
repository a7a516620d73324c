"""Where the drafter should stop when it writes alone, by recorded answers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_export.fit_stopping import Stretch, choose_stopping_rule, fit_stopping_rule, outages
from moa_export.recordings import Recording, record
from moa_runtime.bundle import read_manifest

SURE, UNSURE = math.log(0.95), math.log(0.01)


def stretch(*logprobs: float, kept: int) -> Stretch:
    return Stretch(list(itertools.accumulate(logprobs)), kept)


def test_what_tells_right_from_wrong_becomes_the_threshold() -> None:
    """Sure of four tokens, it is right; then it is not. It writes these, and in each outage the one that it doubts."""
    doubtful = [stretch(*[SURE] * 4, UNSURE, UNSURE, UNSURE, UNSURE, kept=4) for _ in range(5)]
    wrong = [stretch(*[UNSURE] * 16, kept=0) for _ in range(5)]
    found = choose_stopping_rule(doubtful + wrong, 8)
    assert (found.least_probability > 0.01, found.repeated) == (True, 8)
    written = [one.written(math.log(found.least_probability), found.longest) for one in doubtful + wrong]
    kept = sum(min(one.kept, length) for one, length in zip(doubtful + wrong, written, strict=True))
    assert 2 * kept >= sum(written) == 30


def test_a_drafter_that_is_always_right_may_write_long() -> None:
    assert choose_stopping_rule([stretch(*[SURE] * 32, kept=32)], 8).longest == 32


def test_one_that_is_sure_and_wrong_writes_nothing() -> None:
    assert choose_stopping_rule([stretch(*[math.log(0.999)] * 32, kept=0)], 8).longest == 0


def test_a_length_bounds_one_that_is_right_for_three_tokens_and_never_doubts() -> None:
    found = choose_stopping_rule([stretch(*[math.log(0.999)] * 32, kept=3)] * 4, 8)
    assert found.longest == 6


@pytest.fixture(scope="module")
def recordings(target: Target, drafter: MoADrafter) -> list[Recording]:
    return record(target, drafter, ["Name three colours.", "Why is the sky blue?"])


def test_an_outage_is_written_until_little_of_it_is_likely(drafter: MoADrafter, recordings: list[Recording]) -> None:
    backend = torch_backend_of(drafter, top_k=8)
    found = list(outages(backend, recordings[0], ()))
    assert found
    for one in found:
        assert len(one.logprobs) >= 1 and one.kept <= len(one.logprobs)
        assert all(later <= before <= 0 for before, later in itertools.pairwise(one.logprobs))
        assert all(logprob >= math.log(0.05) for logprob in one.logprobs[:-1])


def test_a_random_drafter_hardly_writes(drafter: MoADrafter, recordings: list[Recording]) -> None:
    done: list[int] = []
    found = fit_stopping_rule(torch_backend_of(drafter, top_k=8), recordings, (), lambda by=1: done.append(by))
    stretches = [one for recording in recordings for one in outages(torch_backend_of(drafter, top_k=8), recording, ())]
    written = [one.written(math.log(found.least_probability), found.longest) for one in stretches]
    kept = sum(min(one.kept, length) for one, length in zip(stretches, written, strict=True))
    assert 2 * kept >= sum(written)
    assert len(done) == len(recordings)


def test_a_checked_export_stores_them(onnx_export: tuple[Path, str]) -> None:
    assert read_manifest(onnx_export[0]).manners is not None
