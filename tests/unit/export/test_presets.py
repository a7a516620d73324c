"""How a recipe is put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from moa_export.errors import ExportError
from moa_export.recipe import PRESETS, Recipe, Weights, read_config, resolve
from support.refusals import refused

NONE = {"bits": None, "group_size": None, "head_bits": None, "embedding_bits": None}


def test_single_options_win_over_a_preset_and_a_preset_over_the_file() -> None:
    assert resolve({}, preset_name=None, options=NONE) == PRESETS["laptop"] == Recipe()
    file = {"preset": "max-quality", "head": {"bits": 16}}
    assert resolve(file, preset_name=None, options=NONE).head == Weights(16)
    assert resolve(file, preset_name="phone", options=NONE) == PRESETS["phone"]
    recipe = resolve(file, preset_name="phone", options={**NONE, "head_bits": 8, "group_size": 64})
    assert (recipe.linear, recipe.head, recipe.embedding) == (Weights(4, 64), Weights(8, 64), Weights(4, 64))


def test_bits_hold_for_all_parts_and_set_the_tolerance() -> None:
    recipe = resolve({}, preset_name=None, options={**NONE, "bits": 4, "embedding_bits": 8})
    assert (recipe.linear.bits, recipe.head.bits, recipe.embedding.bits) == (4, 4, 8)
    assert recipe.tolerance == PRESETS["phone"].tolerance
    wide = resolve({}, preset_name=None, options={**NONE, "bits": 32})
    assert (wide.activation_bits, wide.tolerance) == (32, PRESETS["max-quality"].tolerance)


def test_a_file_may_set_the_tolerance(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: phone\ntolerance:\n  tau_loss: 0.5\n")
    recipe = resolve(read_config(path), preset_name=None, options=NONE)
    assert recipe.tolerance.tau_loss == 0.5
    assert recipe.tolerance.top1_agreement == PRESETS["phone"].tolerance.top1_agreement


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "unreadable"),
        ("presett: phone", "unknown_key"),
        ("- phone", "wrong_type"),
        ("a: [", "not_yaml"),
        ("[" * 100_000, "not_yaml"),
        ("linear: {bits: 5}", "unsupported_bits"),
        ("linear: {widht: 5}", "bad_recipe"),
        ("linear: 5", "bad_recipe"),
        ("top_k: many", "bad_recipe"),
        ("top_k: -1", "bad_recipe"),
        ("activation_bits: 3", "unsupported_bits"),
        ("tolerance: {tau_loss: some}", "bad_recipe"),
        ("preset: watch", "unknown_preset"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    with refused(code, ExportError):
        resolve(read_config(path), preset_name=None, options=NONE)


def test_the_manifest_s_recipe_is_read_back() -> None:
    assert Recipe.from_description(PRESETS["phone"].describe()) == PRESETS["phone"]
    with refused("unknown_recipe"):
        Recipe.from_description({"linear": {"bits": 8}})


@pytest.mark.parametrize("group", [-16, 8, 33])
def test_other_group_sizes_are_refused(group: int) -> None:
    with refused("unsupported_group"):
        Weights(4, group)
