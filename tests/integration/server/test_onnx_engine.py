"""Types of the target's numbers in the engine on a processor, and what rounding costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from moa_decoder.errors import TargetError
from moa_decoder.gguf_weights import GgufWeights
from moa_server.engine import rounding_loss
from moa_server.engine.base import EngineError, StepRequest
from moa_server.engine.load import load_local
from support.drafter.gguf_files import write_gguf
from support.refusals import refused
from support.server.stepping import step


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("kind", "own"), [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_numbers_of_a_quantised_file_are_not_rounded_again(kind, own, tiny_target, tiny_drafter, tmp_path):
    [file] = write_gguf(tiny_target, tmp_path / "tiny.gguf", kinds={"norm": None, "blk": GGMLQuantizationType[kind]})
    stored = GgufWeights([file]).matrix(1, "gate")
    for wanted, dtype in (("auto", own), (own, own), ("float32", "float32")):
        engine = load_local(str(file), tiny_drafter, dtype=wanted, threads=1)
        assert engine.facts.dtype == dtype
        taken = engine.weights.matrix(1, "gate")
        np.testing.assert_array_equal(taken.dense(), stored.dense())
        assert dtype == "float32" or np.array_equal(taken.stored, stored.stored)
        rows = step(engine, StepRequest(1, range(9), rows_from=9)).rows  # all are there already
        assert rows is not None and (rows.start, len(rows.keys)) == (9, 0)
        engine.close()


def test_the_loss_by_rounding_is_measured_once_and_refused_if_large(tiny_target, tmp_path, monkeypatch):
    measured = []

    def lossy(engine, original):
        measured.append((engine.facts.dtype, original.facts.dtype))
        return 1.5

    load_local(str(tiny_target), None, dtype="int8", threads=1).close()  # the real measure
    monkeypatch.setattr(rounding_loss, "_measured", lossy)
    load_local(str(tiny_target), None, dtype="int8", threads=1).close()  # known
    for _ in range(2):
        with refused("rounding_loss", EngineError):
            load_local(str(tiny_target), None, dtype="int4", threads=1)
    engine = load_local(str(tiny_target), None, dtype="int4", threads=1, accept_rounding=True)
    assert engine.facts.perplexity_ratio == 1.5
    engine.close()
    assert measured == [("int4", "float32")]
    [kept] = (tmp_path / "cache" / "rounding").glob("*-int4-*")
    for damaged in ("[" * 100_000, '{"perplexity_ratio": -1.0}', '{"perplexity_ratio": 1' + "0" * 400 + "}"):
        kept.write_text(damaged)
        with refused("rounding_loss", EngineError):
            load_local(str(tiny_target), None, dtype="int4", threads=1)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_give_no_numbers_are_refused(number, tiny_target, tmp_path):
    damaged = Path(shutil.copytree(tiny_target, tmp_path / "damaged"))
    weights = load_file(damaged / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = number
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    with refused("not_finite", EngineError):
        load_local(str(damaged), None, dtype="float32", threads=1)


def test_a_family_that_is_not_built_in_is_not_rounded(tiny_target, tmp_path):
    other = Path(shutil.copytree(tiny_target, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with refused("unsupported_type", EngineError):
        load_local(str(other), None, dtype="int8")


def test_without_torch_a_target_of_another_family_is_refused_with_the_cause(tiny_target, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(tiny_target, tmp_path / "mine"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "starcoder2"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("unsupported_target", TargetError, "starcoder2", "moa-edge[torch]"):
        load_local(str(folder), None, threads=1)
