"""Settings from a YAML file and from flags, checked, and the record of a run that is written beside its weights."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_drafter.config import FIRST_LAYERS
from moa_drafter.pretrained import checkpoint_of
from moa_drafter.training.settings import DEFAULT_STEPS, RunSettings
from moa_runtime.errors import MoaError

RECORD_FILE = "training.yaml"
_EXAMPLE = "steps: 3000"
#: Settings whose ``auto`` a run has replaced.
_RESOLVED = ("dtype", "curriculum", "features", "writer")
FIELDS = {field.name: field for field in dataclasses.fields(RunSettings)}
TYPES: dict[str, Any] = typing.get_type_hints(RunSettings)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a file names; the record of an earlier run is such a file too.

    Raises:
        MoaError: no such file, no YAML mapping, an unknown key, a value of a wrong type or out of range.
    """
    raw = read_mapping(path, str(path), example=_EXAMPLE)
    raw = raw.get("settings", raw)
    if not isinstance(raw, dict):
        raise MoaError(f"{path} must hold keys and values, such as `{_EXAMPLE}`")
    raw = dict(raw)
    if raw.pop("first_layers", 0) != 0:  # a setting of version 0.1.0, in the record of each of its runs
        raise MoaError(f"{path}: {FIRST_LAYERS}")
    for key in raw:
        if key not in FIELDS:
            raise MoaError(f"{path} has an unknown key {key!r}: known are {', '.join(FIELDS)}")
    return checked({key: value for key, value in raw.items() if value is not None}, str(path))


def checked(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """The same values in their settings' types.

    Raises:
        MoaError: a wrong type or a value out of range, named with its key.
    """
    where = f"{source}: " if source else ""
    return {key: _in_range(key, _typed(key, value, where), where) for key, value in values.items()}


def resolve(*layers: Mapping[str, Any]) -> RunSettings:
    """Settings from several layers, later ones over earlier ones.

    Raises:
        MoaError: one layer gives both ``steps`` and ``minutes``, or settings do not fit each other.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if "steps" in layer and "minutes" in layer:
            raise MoaError("steps and minutes exclude each other: give one of them")
        for one, other in (("steps", "minutes"), ("minutes", "steps")):
            if one in layer:
                merged.pop(other, None)
        merged.update(layer)
    settings = RunSettings(**merged)
    if settings.step_tokens % settings.accumulate:
        raise MoaError(f"accumulate ({settings.accumulate}) must divide step_tokens ({settings.step_tokens})")
    if settings.data and settings.prompts:
        raise MoaError("prompts and data exclude each other: data already holds answers")
    if settings.minutes is None and not settings.steps:
        settings = dataclasses.replace(settings, steps=DEFAULT_STEPS)
    if settings.curriculum == "auto":
        settings = dataclasses.replace(settings, curriculum="none" if settings.init else "full")
    return settings


def contradiction(stored: RunSettings, given: Mapping[str, Any]) -> str | None:
    """The first given setting that is not what the run was started with, and both its values, for a message."""
    for key, value in given.items():
        if getattr(stored, key) != value and not (value == "auto" and key in _RESOLVED):
            return f"{key} ({value}; the run has {getattr(stored, key)})"
    return None


def plain(settings: RunSettings, *, names_only: bool = False) -> dict[str, Any]:
    """Settings as YAML and JSON know them; what was not set is left out.

    Args:
        names_only: paths without their folders, for files that go to other machines.
    """
    found: dict[str, Any] = {}
    for key in FIELDS:
        value = getattr(settings, key)
        if key == "model" and value and names_only:
            value = Path(value).name if Path(value).is_dir() else value
        if isinstance(value, tuple):
            value = [_path(item, names_only) for item in value]
        elif isinstance(value, Path):
            value = _path(value, names_only)
        if value is not None and value != [] and (key, value) != ("steps", 0):
            found[key] = value
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a YAML file in one rename."""
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(yaml.safe_dump(dict(record), sort_keys=False, allow_unicode=True), encoding="utf-8")
    scratch.replace(path)


def read_mapping(path: Path, name: str, *, example: str, error: type[MoaError] = MoaError) -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Args:
        name: what messages call the file.
        example: a possible line of the file, for messages.
        error: class of the error to raise.

    Raises:
        MoaError: no such file, no YAML, or no mapping.
    """
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot read {name}: {getattr(problem, 'strerror', None) or problem}") from problem
    except yaml.YAMLError as problem:
        raise error(f"{name} is no YAML: {' '.join(str(problem).split())}") from problem
    if not isinstance(raw, dict):
        raise error(f"{name} must hold keys and values, such as `{example}`")
    return raw


def _path(path: Path, names_only: bool) -> str:
    return path.name if names_only else str(path.absolute())


def _typed(key: str, value: Any, where: str) -> Any:
    """``value`` in the type of the setting ``key``."""
    wanted = TYPES[key]
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    kind = next(k for k in kinds if k is not type(None))
    if kind == tuple[Path, ...]:
        items = value if isinstance(value, list | tuple) else [value]
        if items and all(isinstance(item, str | Path) for item in items):
            return tuple(Path(item) for item in items)
        raise MoaError(f"{where}{key} must be a list of files, not {value!r}")
    if kind == dict[str, float]:
        try:
            return {str(name): float(weight) for name, weight in dict(value).items()}
        except (TypeError, ValueError) as error:
            raise MoaError(f"{where}{key} must name kinds with weights, not {value!r}") from error
    if kind is Path and isinstance(value, str | Path):
        return checkpoint_of(value) if key == "init" else Path(value)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML reads 5e-4 as text: its numbers need a point.
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a file"}
    raise MoaError(f"{where}{key} must be {names[kind]}, not {value!r}")


def _in_range(key: str, value: Any, where: str) -> Any:
    limits = FIELDS[key].metadata
    above, least, most = limits["above"], limits["least"], limits["most"]
    wrong = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if above is not None and not value > above:
            wrong = "positive" if above == 0 else f"above {above}"
        elif least is not None and not value >= least:
            wrong = f"at least {least}"
        elif most is not None and not value <= most:
            wrong = f"at most {most}"
        elif math.isinf(value):
            wrong = "finite"
    elif limits["choices"] and value not in limits["choices"]:
        wrong = f"one of {', '.join(limits['choices'])}"
    if wrong:
        raise MoaError(f"{where}{key} must be {wrong}, not {value}")
    return value
