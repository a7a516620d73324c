"""JSON schemas to measure with: varied, always the same ones, with short keys and long values."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "city", "date", "note", "tags", "kind", "size", "team", "cost", "code", "plan", "goal", "home")
_WORDS = ("red", "green", "small", "large", "open", "closed", "first class", "by air", "by sea", "not yet", "every day")
_PATTERNS = (
    "^[A-Z][a-z]{3,9} [A-Z][a-z]{3,9}$",
    "^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    "^[a-z]{3,8}@[a-z]{3,8}\\.(com|org)$",
    "^\\+[0-9]{2} [0-9]{3} [0-9]{6}$",
    "^[A-Z]{3}-[0-9]{4}$",
)
_SUBJECTS = ("a person", "a book", "a journey", "a shop", "a dish", "an animal", "a film", "a house", "a tool", "a job")


class SchemaMaker:
    """Makes JSON schemas: nested objects, arrays, enums, patterns, optional properties, unions."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """Make an object, or an array of them."""
        rng, whole = self._rng, self._object(0)
        if rng.random() < 0.85:
            return whole
        return {"type": "array", "items": self._object(1), "minItems": 1, "maxItems": rng.randint(1, 3)}

    def question(self, schema: dict[str, Any]) -> str:
        """Make a question for an answer of this form."""
        names = sorted(set(_names_in(schema)))
        return f"Describe {self._rng.choice(_SUBJECTS)} as JSON with the fields {', '.join(names)}."

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(2, 4 if depth == 0 else 3))
        properties = {name: self._value(depth) for name in names}
        required = [name for name in names if rng.random() < 0.75] or names[:1]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _value(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds = ["text", "text", "text", "pattern", "enum", "integer", "number", "boolean", "texts", "union"]
        match rng.choice([*kinds, *(["object", "objects"] if depth < 2 else [])]):
            case "text":
                return {"type": "string", "minLength": rng.randint(4, 20), "maxLength": rng.randint(24, 60)}
            case "pattern":
                return {"type": "string", "pattern": rng.choice(_PATTERNS)}
            case "enum":
                return {"enum": rng.sample(_WORDS, rng.randint(2, 6))}
            case "integer":
                return {"type": "integer", "minimum": 0, "maximum": rng.choice([9, 120, 5000])}
            case "number":
                return {"type": "number", "minimum": 0, "maximum": 1000}
            case "boolean":
                return {"type": "boolean"}
            case "texts":
                few = {"minItems": rng.randint(1, 2), "maxItems": rng.randint(2, 4)}
                return {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 24}, **few}
            case "union":
                return {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "integer"}, {"type": "null"}]}
            case "object":
                return self._object(depth + 1)
            case _:
                return {"type": "array", "items": self._object(2), "minItems": 1, "maxItems": 2}


def _names_in(schema: dict[str, Any]) -> list[str]:
    own = schema.get("properties", {})
    inner = [*own.values(), *([schema["items"]] if "items" in schema else [])]
    return [*own, *(name for each in inner for name in _names_in(each))]
