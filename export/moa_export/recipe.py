"""Recipes: the bits of an export's weights and the loss that is permitted, by preset, YAML file and single options.

A recipe says nothing about packing or runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from moa_drafter.config import DrafterConfig, RivalConfig
from moa_drafter.training.settings import read_mapping
from moa_export.errors import ExportError

#: Widths that stored weights can have. 32 is float32, 16 float16; 8 and 4 are integers with scales.
BITS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Weights:
    """How the stored weights of one part are rounded.

    Attributes:
        bits: one of :data:`BITS`.
        group_size: consecutive inputs of one output row that share a scale; 0 for one scale a row. Has
            no effect from 16 bits on.
        symmetric: whether 0 is represented without an offset.

    Raises:
        ExportError: bits or a group size that there is not.
    """

    bits: int = 8
    group_size: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            known = ", ".join(map(str, BITS))
            raise ExportError(f"weights can have {known} bits, not {self.bits}", code="unsupported_bits")
        if self.group_size < 0 or self.group_size % 16:
            reason = f"a group size must be a multiple of 16, or 0 for one scale a row, not {self.group_size}"
            raise ExportError(reason, code="unsupported_group")

    @property
    def is_integer(self) -> bool:
        return self.bits < 16


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted differences of an exported graph from the float32 device half.

    Attributes:
        mean_logprob_error: mean absolute error of the top-k log-probabilities (nats).
        top1_agreement: least share of queries with the same most probable token. Loosest of the three, because
            two candidates of nearly equal probability trade places under any rounding.
        top_k_overlap: least mean share of the top-k tokens found in both.
        tau_loss: largest accepted decrease of tau, as a share of the float32 tau.
    """

    mean_logprob_error: float = 0.1
    top1_agreement: float = 0.93
    top_k_overlap: float = 0.94
    tau_loss: float = 0.02


@dataclass(frozen=True)
class Recipe:
    """Which weights are quantised to how many bits.

    Attributes:
        linear: the layers' matrices.
        head: the draft head.
        embedding: the token embedding.
        activation_bits: 8 (rounded on the fly where a target can, so that products run in integers) or 32.
        top_k: candidates per query that the graph returns.
    """

    linear: Weights = field(default_factory=Weights)
    head: Weights = field(default_factory=Weights)
    embedding: Weights = field(default_factory=lambda: Weights(group_size=0))
    activation_bits: int = 8
    top_k: int = 16
    tolerance: Tolerance = field(default_factory=Tolerance)

    def describe(self) -> dict[str, Any]:
        """The resolved recipe in plain values, as the manifest keeps it."""
        return asdict(self)

    def check_divides(self, config: DrafterConfig | RivalConfig) -> None:
        """Raise an ExportError if a part's groups do not divide the drafter's sizes."""
        decoder = config.decoder
        hidden = {"hidden size": decoder.hidden_size}
        inner = {"FFN": decoder.intermediate_size, "attention width": decoder.num_heads * decoder.head_dim}
        for weights, sizes in ((self.linear, {**hidden, **inner}), (self.head, hidden), (self.embedding, hidden)):
            for name, size in sizes.items():
                if weights.is_integer and weights.group_size and size % weights.group_size:
                    raise ExportError(
                        f"a group size of {weights.group_size} does not divide the drafter's {name} of {size}: choose "
                        "a divisor with --group-size",
                        code="unsupported_group",
                    )

    def check_symmetric(self, target: str, *parts: str) -> None:
        """Raise an ExportError if integers of one of the parts have an offset, which ``target`` cannot store."""
        for part in parts:
            weights: Weights = getattr(self, part)
            if weights.is_integer and not weights.symmetric:
                reason = f"{target} stores the {part} weights without an offset: set symmetric for them"
                raise ExportError(reason, code="unsupported_offset")

    @classmethod
    def from_description(cls, plain: Mapping[str, Any]) -> Recipe:
        """The recipe that :meth:`describe` described.

        Raises:
            ExportError: a field that this version does not know.
        """
        try:
            parts = {name: Weights(**plain[name]) for name in ("linear", "head", "embedding")}
            return cls(**{**plain, **parts, "tolerance": Tolerance(**plain["tolerance"])})
        except (KeyError, TypeError) as error:
            reason = f"the bundle's recipe is not one of this version: {error}; export it again"
            raise ExportError(reason, code="unknown_recipe") from error


#: Permitted losses by the fewest bits in a recipe, set from measurements of the default drafter.
_TOLERANCES = {
    4: Tolerance(mean_logprob_error=0.6, top1_agreement=0.62, top_k_overlap=0.72, tau_loss=0.05),
    8: Tolerance(),
    **dict.fromkeys((16, 32), Tolerance(0.02, top1_agreement=0.98, top_k_overlap=0.98, tau_loss=0.01)),
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
    """Return a preset; raise an ExportError that lists the presets if there is none of that name."""
    if name not in PRESETS:
        raise ExportError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}", code="unknown_preset")
    return PRESETS[name]


def read_config(path: Path) -> dict[str, Any]:
    """Read an export's YAML file: ``preset``, ``linear``, ``head``, ``embedding``, ``activation_bits``, ``top_k``,
    ``tolerance``, and the command's ``target``, ``model``, ``drafter``, ``backend`` and ``context``.

    Raises:
        ExportError: no such file, no YAML mapping, or an unknown key.
    """
    raw = read_mapping(path, f"--config {path}", example="preset: phone", error=ExportError)
    known = {"preset", "activation_bits", "top_k", "tolerance", *_PARTS, *_SETTINGS}
    if unknown := [str(key) for key in raw if key not in known]:
        reason = f"--config {path} has an unknown key {unknown[0]!r}: known are {', '.join(sorted(known))}"
        raise ExportError(reason, code="unknown_key")
    return raw


def resolve(config: Mapping[str, Any], *, preset_name: str | None, options: Mapping[str, int | None]) -> Recipe:
    """Combine a recipe: single options override a preset, which overrides the file.

    Args:
        config: as :func:`read_config` returns it; empty without a file.
        options: ``bits``, ``group_size``, ``head_bits``, ``embedding_bits``; None where not given.

    Raises:
        ExportError: an invalid value.
    """
    recipe = preset(preset_name) if preset_name is not None else _from_config(config)
    for part in _PARTS:
        own = options.get(f"{part}_bits")
        given = {"bits": options.get("bits") if own is None else own, "group_size": options.get("group_size")}
        recipe = _with_part(recipe, part, {name: value for name, value in given.items() if value is not None})
    if any(value is not None for value in options.values()):
        wide = recipe.linear.bits > 8
        recipe = replace(recipe, tolerance=default_tolerance(recipe), activation_bits=32 if wide else 8)
    return recipe


def default_tolerance(recipe: Recipe) -> Tolerance:
    """Return the permitted loss for the fewest bits in ``recipe``."""
    return _TOLERANCES[min(getattr(recipe, part).bits for part in _PARTS)]


def _with_part(recipe: Recipe, part: str, changed: Mapping[str, Any]) -> Recipe:
    return replace(recipe, **{part: replace(getattr(recipe, part), **changed)})


def _from_config(config: Mapping[str, Any]) -> Recipe:
    recipe = preset(str(config.get("preset", DEFAULT_PRESET)))
    recipe = replace(recipe, **{part: _changed(getattr(recipe, part), part, config.get(part, {})) for part in _PARTS})
    given = {name: config[name] for name in ("activation_bits", "top_k") if name in config}
    recipe = _changed(recipe, "the recipe", given)
    if recipe.activation_bits not in (8, 32):
        raise ExportError(f"activation_bits must be 8 or 32, not {recipe.activation_bits}", code="unsupported_bits")
    if recipe.top_k < 1:
        raise ExportError(f"top_k must be at least 1, not {recipe.top_k}", code="bad_recipe")
    if not config.keys().isdisjoint((*_PARTS, "activation_bits")):
        recipe = replace(recipe, tolerance=default_tolerance(recipe))
    return replace(recipe, tolerance=_changed(recipe.tolerance, "tolerance", config.get("tolerance", {})))


_Part = TypeVar("_Part", Weights, Tolerance, Recipe)


def _changed(part: _Part, name: str, given: Any) -> _Part:
    """Return a part of a recipe with the values that a file gives; raise an ExportError if one is unusable."""
    if not isinstance(given, Mapping):
        raise ExportError(f"{name} in the --config file must hold keys and values, not {given!r}", code="bad_recipe")
    known = [each.name for each in fields(part)]
    for key, value in given.items():
        if key not in known:
            text = f"{name} in the --config file has an unknown key {key!r}: known are {', '.join(known)}"
            raise ExportError(text, code="bad_recipe")
        usual = getattr(part, key)
        if type(value) is not type(usual) and not (type(value) is int and type(usual) is float):
            kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(usual)]
            raise ExportError(f"{key} in the --config file must be {kind}, not {value!r}", code="bad_recipe")
    return replace(part, **given)
