"""llama.cpp as the peer of the verifier, if it is installed, on a tiny target's GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from moa_bench.llamacpp import LlamaCpp, requantise
from moa_runtime.session.events import Sampling
from support.drafter.gguf_files import write_gguf
from support.refusals import refused

PROMPT = [3, 4, 5, 3, 4, 5, 3, 4]


def written(file: Path, sampling: Sampling = Sampling(), **more) -> tuple[list[int], int]:  # noqa: B008 (frozen)
    engine = LlamaCpp(file, threads=1, context=640, **more)
    passes = [list(engine.decode(prompt, 40, sampling)) for prompt in (PROMPT, PROMPT * 65, PROMPT)]
    first, _, again = ([token for new in answer for token in new] for answer in passes)
    assert first == again and all(0 < len(new) <= 3 for answer in passes for new in answer)
    assert engine.forwards == sum(map(len, passes)) + 1  # the long prompt takes two
    return first, engine.forwards


def test_answers_are_the_same_with_drafts_and_end_at_a_stop_token(tiny_target: Path, tmp_path: Path):
    [file] = write_gguf(tiny_target, tmp_path / "tiny.gguf")
    for sampling in (Sampling(), Sampling(0.8, 0.95, 7)):
        alone, forwards = written(file, sampling)
        drafted, fewer = written(file, sampling, lookup=True)
        assert alone == drafted and len(alone) == 40 and fewer < forwards
    stop = alone[6]
    assert written(file, sampling, stop_tokens=[stop])[0] == alone[: alone.index(stop) + 1]


def test_a_file_is_rounded_again(tiny_target: Path, tmp_path: Path):
    [file] = write_gguf(tiny_target, tmp_path / "tiny.gguf")
    made = tmp_path / "q4_0.gguf"
    requantise(file, made)
    assert made.stat().st_size < file.stat().st_size and len(written(made)[0]) == 40
    made.write_bytes(b"no model")
    with refused("not_readable"):
        LlamaCpp(made, threads=1, context=64)
    with refused("llamacpp_failed"):
        requantise(made, tmp_path / "none.gguf")
