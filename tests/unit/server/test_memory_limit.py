"""``--memory`` and ``--list-models``: targets by name; those that do not fit are refused before they are fetched."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moa_decoder.errors import TargetError
from moa_drafter import target_source as hub
from moa_drafter.catalogue import CATALOGUE, default_drafter, drafter_advice
from moa_drafter.pretrained import shipped_names
from moa_drafter.target_facts import facts_of
from moa_drafter.target_folder import weights_of
from moa_drafter.target_source import BUILTIN, check_target, is_hub_id
from moa_export.plain_bundle import note_of
from moa_runtime.errors import MoaError
from moa_server.cli import main
from moa_server.engine.base import EngineError
from moa_server.engine.memory_limit import check_memory, check_rounded_type, size_of
from support.drafter.gguf_files import write_gguf
from support.refusals import refused


@pytest.mark.parametrize(
    ("model", "dtype", "most", "advice"),
    [
        ("qwen3-8b", "float32", 30, "pass --dtype int8"),
        ("qwen3-8b", "int8", 13, "pass --dtype int4"),
        ("qwen3-8b", "int4", 8, "pass --cache-tokens 17408"),
        ("qwen3-8b", "float32", 7, "pass --dtype int4 --cache-tokens 10240"),
        ("qwen3-8b", "int4", 5, "--list-models"),
        ("gpt-oss-20b", "bfloat16", 20, "--list-models"),
        ("smollm2-135m-instruct", "auto", 0.5, "pass --cache-tokens 17408"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_with_a_way_out(model, dtype, most, advice) -> None:
    with refused("too_large") as caught:
        check_memory(model, dtype, "cpu", 32768, most)
    assert advice in str(caught.value)
    needed = float(re.search(r"takes ([0-9.]+) GB", str(caught.value))[1])
    check_memory(model, dtype, "cpu", 32768, needed + 0.1)
    with refused("too_large"):
        check_memory(model, dtype, "cpu", 32768, needed - 0.1)


@pytest.mark.parametrize("way", ["pass --dtype int4 --cache-tokens 10240", "pass --cache-tokens 17408"])
def test_the_way_out_leads_out(way: str) -> None:
    dtype = "int4" if "--dtype" in way else "auto"
    model, most = ("qwen3-8b", 7) if dtype == "int4" else ("smollm2-135m-instruct", 0.5)
    check_memory(model, dtype, "cpu", int(way.split()[-1]), most)


def test_a_type_that_a_family_has_not_is_refused_before_anything_is_fetched(monkeypatch) -> None:
    monkeypatch.setattr(hub, "fetch_hub_files", lambda *_, **__: pytest.fail("it fetches"))
    assert main(["--model", "gpt-oss-20b", "--dtype", "int4", "--memory", "60"]) != 0
    with refused("unsupported_type", EngineError):
        check_rounded_type("gpt-oss-20b", "int8")
    check_rounded_type("gpt-oss-20b", "auto")
    check_rounded_type("qwen3-8b", "int4")


def test_the_size_of_a_folder_is_that_of_its_tensors(tiny_target: Path) -> None:
    weights, size = weights_of(tiny_target), size_of(str(tiny_target))
    assert size.parameters == sum(math.prod(shape) for shape in weights._layout.shapes.values())
    config = facts_of(tiny_target).config
    assert size.kv_numbers == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def test_every_kind_of_target_has_a_size_and_its_own_type(tiny_target: Path, tmp_path: Path, caplog) -> None:
    """A GGUF file, an undescribed family, and one whose weights are not here, of which it is said."""
    size = size_of(str(tiny_target))
    with refused("too_large", MoaError, "in float32"):  # as it is stored, whatever this processor can
        check_memory(str(tiny_target), "auto", "cpu", 512, 1e-6)
    [file] = write_gguf(tiny_target, tmp_path / "model.gguf")
    assert size_of(str(file)) == size
    other = shutil.copytree(tiny_target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "lfm2"}))
    assert size_of(str(other)) == replace(size, rounds=False)
    (other / "config.json").write_text(json.dumps({**config, "num_attention_heads": "x"}))
    with refused("unreadable", TargetError, "num_attention_heads"):
        size_of(str(other))
    (other / "config.json").write_text(json.dumps({**config, "model_type": "lfm2", "num_key_value_heads": [2]}))
    assert size_of(str(other)).parameters == size.parameters
    (other / "model.safetensors").unlink()
    check_memory(str(other), "auto", "cpu", 512, 1e-6)
    [warned] = caplog.records
    assert str(other) in warned.args


def test_the_catalogue_names_what_can_be_found(capsys) -> None:
    for name, model in CATALOGUE.items():
        check_target(name)
        assert model.target in BUILTIN or is_hub_id(model.target)
        assert all(drafter in shipped_names() or is_hub_id(drafter) for drafter in model.drafters)
        assert model.writer in ("", "target") or is_hub_id(model.writer)
    assert BUILTIN.keys() <= CATALOGUE.keys()
    assert main(["--list-models", "--json"]) == 0 and json.loads(capsys.readouterr().out).keys() == CATALOGUE.keys()
    assert main(["--list-models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and all(drafter in out for drafter in each.drafters) for name, each in CATALOGUE.items())
    with refused("unknown_target", TargetError, "qwen3-0.6b"):
        check_target("Qwen3-0.6B")


def test_a_name_of_the_catalogue_has_a_drafter_without_one_named() -> None:
    """The same at the server and for a bundle; other targets have none."""
    assert default_drafter("qwen3-1.7b") == "AngelSlim/Qwen3-1.7B_eagle3" and default_drafter("qwen3-0.6b") == "sssd"
    assert default_drafter("smollm2-135m-instruct") == shipped_names()[0] and default_drafter("owner/model") is None


def test_a_target_without_a_drafter_is_told_of_one() -> None:
    for name in ("qwen3-8b", "Qwen/Qwen3-8B"):
        assert CATALOGUE["qwen3-8b"].drafters[0] in drafter_advice(name)
    assert "moa-train" in drafter_advice("someone/other")
    assert "copies" in note_of("someone/other", "sssd") and "copies" not in note_of("someone/other", "none")


def test_the_page_of_models_has_the_catalogue() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    for name, model in CATALOGUE.items():
        row = next(line for line in page.splitlines() if line.startswith(f"|`{name}`|"))
        hub_ids = [each for each in (model.target, *model.drafters, model.writer) if is_hub_id(each)]
        assert all(hub_id in row for hub_id in hub_ids) and model.licence in row and model.use in row
    assert [name for name, model in CATALOGUE.items() if model.run] == [next(iter(CATALOGUE))]  # as the page says
