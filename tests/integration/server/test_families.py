"""Targets of many families: the logits and the texts are those of transformers, or the target is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter

from moa_decoder.errors import TargetError
from moa_decoder.gguf_weights import GgufWeights
from moa_drafter.target import load_target, target_facts
from moa_runtime.errors import MoaError
from moa_server.engine.base import EngineError
from moa_server.engine.torch_engine import target_pass
from support.drafter.gguf_files import write_gguf
from support.families import (
    CONTEXT,
    FAMILIES,
    ORIGINAL,
    WINDOW,
    cells,
    computed,
    computed_by_graphs,
    make_target,
    shown,
)
from support.refusals import refused

FUSED = {
    "Llama",
    "Llama (biases)",
    "Llama 3 (llama3 positions)",
    "Llama (yarn)",
    "Qwen 2",
    "Mistral",
}
FUSED |= {"Ministral 3 (scaled queries)", "Seed-OSS"}
REFUSED = {"OPT": "opt", "GPT-2": "gpt2", "GPT-NeoX": "gpt_neox", "Falcon": "falcon"}
#: Types that graphs are built for, and why they cannot be for other targets that the general pass computes.
DESCRIBED = {"llama", "mistral", "ministral3", "qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3_text", "smollm3"}
DESCRIBED |= {"phi3", "granite"}
NO_GRAPHS = {family: repr(kind) for family, (kind, _) in FAMILIES.items() if kind not in DESCRIBED}
NO_GRAPHS["Llama (dynamic NTK)"] = "'dynamic'"
NO_GRAPHS["Llama (query scaling ignored)"] = "rope_parameters.llama_4_scaling_beta"
SHORTER = {"Phi 3 (longrope)": (ORIGINAL, "(longrope)")}


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family not in REFUSED])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the family."""
    return make_target(family, tiny_target, tmp_path_factory.mktemp("family"))


@pytest.mark.filterwarnings("error:.*is deprecated:FutureWarning")
def test_a_target_is_computed_as_transformers_does(family: str, folder: Path) -> None:
    """To the end of its context, over the end of an original one, of a window and of a chunk; no further."""
    found = computed(folder)
    assert found.runs == ("FusedLlama" if family in FUSED else "GeneralPass")
    context, why = SHORTER.get(family, (CONTEXT, "max_position_embeddings"))
    assert (found.context, why in found.why) == (context, True)
    assert found.variation < 0.01
    assert found.equal


def test_graphs_compute_a_target_as_transformers_does(family: str, folder: Path) -> None:
    """Over the end of a window, and to that of an original context."""
    if family in NO_GRAPHS:
        with refused("unsupported_target", TargetError, NO_GRAPHS[family]):
            computed_by_graphs(folder)
        return
    found = computed_by_graphs(folder)
    assert found.context == SHORTER.get(family, (CONTEXT,))[0]
    assert found.deviation < 1e-4 and found.writer < 1e-3
    assert found.equal


@pytest.mark.parametrize(
    ("family", "architecture", "metadata"),
    [
        ("Qwen 2", "qwen2", {}),
        ("Qwen 3", "qwen3", {}),
        ("Gemma", "gemma", {}),
        (
            "Gemma 2 (both soft caps)",
            "gemma2",
            {"attention.sliding_window": WINDOW, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
        ),
        ("OLMo 2", "olmo2", {}),
        ("Phi 3", "phi3", {}),
        (
            "Granite (scaled logits, multipliers)",
            "granite",
            {"logit_scale": 8.0, "embedding_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.3},
        ),
    ],
)
def test_a_gguf_file_is_computed_as_its_model(family, architecture, metadata, tiny_target, tmp_path, monkeypatch):
    """By the graphs, and by transformers in the folder that is made of it."""
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))

    def add(writer: GGUFWriter) -> None:
        for key, value in metadata.items():
            put = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            put(f"{architecture}.{key}", value)

    folder = make_target(family, tiny_target, tmp_path / "model")
    files = write_gguf(folder, tmp_path / "model.gguf", architecture=architecture, add=add)
    found = computed_by_graphs(folder, GgufWeights(files))
    assert found.deviation < 1e-4 and found.equal
    text = torch.arange(CONTEXT)[None]
    logits, wanted = (load_target(str(each)).model(text).logits for each in (files[0], folder))
    assert (logits - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("family", REFUSED)
def test_a_target_that_is_not_computed_is_refused(family: str, tiny_target: Path, tmp_path: Path) -> None:
    """And no bundle is made of it."""
    folder = make_target(family, tiny_target, tmp_path)
    for read in (computed, lambda folder: target_facts(str(folder))):
        with pytest.raises(MoaError) as caught:
            read(folder)
        assert REFUSED[family] in str(caught.value) and "\n" not in str(caught.value)


def test_a_target_that_computes_no_numbers_is_refused(tiny_target: Path) -> None:
    target = load_target(str(tiny_target))
    target.model.model.norm.weight.data[0] = torch.nan
    with refused("wrong_results", EngineError):
        target_pass(target, torch.float32)


@pytest.mark.slow
def test_the_table_of_families_is_what_runs(family: str, folder: Path) -> None:
    """But for the column of vLLM, which its own tests run."""
    assert shown()[family][:-1] == list(cells(folder))
