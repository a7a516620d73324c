"""Fields of a ``config.json``: that all are there, known, and of their kind, before anything is built of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from moa_runtime.errors import MoaError


class ConfigError(MoaError, ValueError):
    """A drafter configuration that cannot be built; the message names the field."""


#: By annotation: what a field must be in words, and whether a value of JSON is.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number from 0 on", lambda value: type(value) is int and value >= 0),
    "float": (
        "a positive number",
        lambda value: type(value) in (int, float) and value > 0 and math.isfinite(value),
    ),
    "bool": ("true or false", lambda value: type(value) is bool),
    "str": ("a string", lambda value: type(value) is str),
    "LayerDims": ("an object", lambda value: isinstance(value, Mapping)),
    "tuple[int, ...]": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(type(number) is int for number in value),
    ),
}


def check_fields(config: type, raw: Mapping[str, Any], inside: str = "") -> None:
    """Check what a file says of a dataclass.

    Args:
        inside: the field whose object ``raw`` is; empty for the whole file.

    Raises:
        ConfigError: a field that is missing, unknown, or of another kind.
    """
    what, before = "not a drafter configuration: ", f"{inside}." if inside else ""
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in raw:
        if name not in fields:
            raise ConfigError(f"{what}the field {before + name!r:.60} is unknown")
    for name, field in fields.items():
        if name not in raw:
            if field.default is dataclasses.MISSING:
                raise ConfigError(f"{what}the field {before + name!r} is missing")
            continue
        words, is_one = _KINDS[str(field.type)]
        if not is_one(raw[name]):
            raise ConfigError(f"{what}{before}{name} must be {words}, not {raw[name]!r:.60}")
