"""Why a JSON schema's references cannot be followed, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST = 80  # characters of a reference in a sentence


def reference_problem(schema: Mapping[str, Any]) -> str:
    """Return what is wrong with the references in a schema that does not compile; empty if that is not the reason."""
    for reference in _references(schema):
        if not reference.startswith("#"):
            return f"$ref {reference[:_LONGEST]!a}: only $ref within the schema (#/...) are followed"
        if reference == "#" or reference.startswith("#/"):
            part = _part(schema, reference)
            if part is None:
                return f"$ref {reference[:_LONGEST]!a}: the schema has no such part"
            if _circular(schema, part):
                return "the schema refers only to itself"
    return ""


def _references(schema: Any) -> Iterator[str]:
    """Yield each ``$ref``."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _circular(schema: Mapping[str, Any], part: Any) -> bool:
    """Return whether the references that begin with ``part`` end at none other."""
    seen: set[str] = set()
    while isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
        if reference in seen:
            return True
        seen.add(reference)
        part = _part(schema, reference)
    return False


def _part(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a JSON pointer names; None if there is none."""
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and step in schema:
            schema = schema[step]
        elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
            schema = schema[int(step)]
        else:
            return None
    return schema
