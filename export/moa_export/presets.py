"""Recipes with a name, and how a recipe is put together from a preset, a file and single options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_drafter.training.config_file import read_mapping
from moa_export.errors import ExportError
from moa_export.recipe import Recipe, Tolerance, Weights

#: Permitted losses by the fewest bits in a recipe, set from measurements of the default drafter.
_TOLERANCES = {
    4: Tolerance(mean_logprob_error=0.6, top1_agreement=0.62, top_k_overlap=0.72, tau_loss=0.05),
    8: Tolerance(),
    16: Tolerance(mean_logprob_error=0.02, top1_agreement=0.98, top_k_overlap=0.98, tau_loss=0.01),
    32: Tolerance(mean_logprob_error=0.02, top1_agreement=0.98, top_k_overlap=0.98, tau_loss=0.01),
}

_PHONE = Weights(4, 32)
PRESETS: dict[str, Recipe] = {
    "phone": Recipe(_PHONE, _PHONE, Weights(4, 64), tolerance=_TOLERANCES[4]),
    "laptop": Recipe(),
    "max-quality": Recipe(Weights(32), Weights(32), Weights(32), activation_bits=32, tolerance=_TOLERANCES[32]),
}
DEFAULT_PRESET = "laptop"

_PARTS = ("linear", "head", "embedding")
_SETTINGS = ("model", "drafter", "target", "backend", "context")


def preset(name: str) -> Recipe:
    """Raises ExportError: no such preset; the message lists those there are."""
    if name not in PRESETS:
        raise ExportError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def read_config(path: Path) -> dict[str, Any]:
    """Read an export's YAML file: ``preset``, ``linear``, ``head``, ``embedding``, ``activation_bits``, ``top_k``,
    ``tolerance``, and the command's ``target``, ``model``, ``drafter``, ``backend`` and ``context``.

    Raises:
        ExportError: no such file, no YAML mapping, or a key that there is not.
    """
    raw = read_mapping(path, f"--config {path}", example="preset: phone", error=ExportError)
    known = {"preset", "activation_bits", "top_k", "tolerance", *_PARTS, *_SETTINGS}
    if unknown := [str(key) for key in raw if key not in known]:
        raise ExportError(f"--config {path} has an unknown key {unknown[0]!r}: known are {', '.join(sorted(known))}")
    return raw


def resolve(config: Mapping[str, Any], *, preset_name: str | None, options: Mapping[str, int | None]) -> Recipe:
    """The recipe that is meant: single options over a preset over the file.

    Args:
        config: as :func:`read_config` returns it; empty without a file.
        options: ``bits``, ``group_size``, ``head_bits``, ``embedding_bits``; None where not given.

    Raises:
        ExportError: a value that there is not.
    """
    recipe = preset(preset_name) if preset_name is not None else _from_config(config)
    for part in _PARTS:
        own = options.get(f"{part}_bits")
        bits = own if own is not None else options.get("bits")
        changed = {"bits": bits, "group_size": options.get("group_size")}
        changed = {name: value for name, value in changed.items() if value is not None}
        if changed:
            recipe = dataclasses.replace(recipe, **{part: dataclasses.replace(getattr(recipe, part), **changed)})
    if any(value is not None for value in options.values()):
        recipe = dataclasses.replace(
            recipe, tolerance=default_tolerance(recipe), activation_bits=32 if recipe.linear.bits > 8 else 8
        )
    return recipe


def default_tolerance(recipe: Recipe) -> Tolerance:
    """What may be lost with the fewest bits of ``recipe``."""
    return _TOLERANCES[min(getattr(recipe, part).bits for part in _PARTS)]


def _from_config(config: Mapping[str, Any]) -> Recipe:
    recipe = preset(str(config.get("preset", DEFAULT_PRESET)))
    try:
        for part in _PARTS:
            if part in config:
                weights = dataclasses.replace(getattr(recipe, part), **config[part])
                recipe = dataclasses.replace(recipe, **{part: weights})
        plain = {name: int(config[name]) for name in ("activation_bits", "top_k") if name in config}
        recipe = dataclasses.replace(recipe, **plain)
        if not set(config).isdisjoint((*_PARTS, "activation_bits")):
            recipe = dataclasses.replace(recipe, tolerance=default_tolerance(recipe))
        if "tolerance" in config:
            tolerance = dataclasses.replace(recipe.tolerance, **config["tolerance"])
            recipe = dataclasses.replace(recipe, tolerance=tolerance)
    except (TypeError, ValueError) as error:
        raise ExportError(f"the --config file describes no recipe: {error}") from error
    return recipe
