"""Targets of many families: vLLM's texts are those of transformers, or the target is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moa_server.engine.base import EngineError
from support.families import ORIGINAL, make_target, refusal_of_vllm, shown, vllm_processes
from support.refusals import refused

pytestmark = pytest.mark.slow

#: Families that are refused, and what the sentence says: of recurrent layers, of classes of transformers that vLLM
#: takes for others, and one whose text vLLM writes otherwise.
REFUSED = {
    "Phi 3.5 MoE": "unpack",
    "MiniMax M2": "rotary_dim",
    "LFM 2": "conv_dim",
    "Qwen 3 Next": "several kinds",
    "Qwen 3.5": "failed to be inspected",
    "Granite 4 (hybrid)": "several kinds",
    "Falcon H1": "several kinds",
    "LFM 2 MoE": "AssertionError",
    "Qwen 3.5 MoE": "failed to be inspected",
    "Nemotron H": "is_act_and_mul",
    "OLMo Hybrid": "set_allocator",
    "Gemma 3n (soft cap)": "per-layer",
    "DeepSeek 3 (latent attention)": "e_score_correction_bias",
    "Gemma 4": "model.layers.2",  # one that shares keys and values, of another size than other layers'
}
REFUSED |= {"OPT": "opt", "GPT-2": "gpt2", "GPT-NeoX": "gpt_neox", "Falcon": "falcon"}
RUN = [family for family, cells in shown().items() if cells[-1] != "not run"]


@pytest.fixture(scope="module")
def processes(vllm_here: None) -> Iterator[ProcessPoolExecutor]:
    with vllm_processes() as made:
        yield made


@pytest.mark.parametrize("family", RUN)
def test_a_target_is_computed_as_transformers_does(
    family: str, processes: ProcessPoolExecutor, paged_target: Path, tmp_path: Path
) -> None:
    """Past windows and original contexts, as a draft, and after a part of the text was taken back."""
    folder = make_target(family, paged_target, tmp_path / "target", wide=True)
    refusal = processes.submit(refusal_of_vllm, folder).result()
    assert shown()[family][-1] == ("no" if refusal else "yes")
    assert bool(refusal) == (family in REFUSED) and REFUSED.get(family, "") in refusal and "\n" not in refusal


def test_no_position_is_beyond_those_that_vllm_has(vllm_here: None, paged_target: Path, tmp_path: Path) -> None:
    """vLLM has as many as a yarn's factor says, whatever the configuration's context is."""
    from moa_server.engine.vllm.engine import VllmEngine

    folder = make_target("Llama (yarn)", paged_target, tmp_path, wide=True)
    change(folder, lambda config: config["rope_parameters"].update(factor=2.0))
    with refused("out_of_range", EngineError, str(2 * ORIGINAL)):
        VllmEngine.load(str(folder), None)
    VllmEngine.load(str(folder), None, max_context=2 * ORIGINAL).close()


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("Llama 4 (chunks)", {"attention_chunk_size": 30}, "30"),  # no whole blocks: known to its first step
        ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention"]}, "windows"),  # vLLM's begin with one
    ],
)
def test_a_configuration_that_vllm_ignores_or_does_not_take_is_refused_at_load(
    family: str, fields: dict[str, Any], named: str, vllm_here: None, paged_target: Path, tmp_path: Path
) -> None:
    from moa_server.engine.vllm.engine import VllmEngine

    folder = make_target(family, paged_target, tmp_path, wide=True)
    change(folder, lambda config: config.update(fields))
    with refused("unsupported_target", EngineError, named):
        VllmEngine.load(str(folder), None)


def change(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
    """Change a target's configuration."""
    config = json.loads((folder / "config.json").read_text())
    how(config)
    (folder / "config.json").write_text(json.dumps(config))
