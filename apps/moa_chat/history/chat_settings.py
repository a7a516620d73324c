"""What a user has chosen for a chat, and how it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ChatSettings:
    """How the questions of a chat are answered.

    Attributes:
        system: instructions to the model, perhaps of several lines; empty for none.
        max_new_tokens: of every answer.
        recommended: sample as the target's authors recommend; ``temperature`` and ``top_p`` do not count then.
        temperature: 0 is greedy.
        top_p: 1 is no limit.
    """

    system: str = ""
    max_new_tokens: int = 512
    recommended: bool = True
    temperature: float = 0.0
    top_p: float = 1.0


def settings_to_json(settings: ChatSettings) -> str:
    return json.dumps(asdict(settings))


def settings_from_json(text: str) -> ChatSettings:
    """What :func:`settings_to_json` wrote; the default where a value is missing or is of another type."""
    try:
        stored = json.loads(text)
    except ValueError:
        stored = {}
    return ChatSettings(**well_typed(stored, ChatSettings()))


def well_typed(stored: Any, defaults: ChatSettings) -> dict[str, Any]:
    """The values of ``stored`` that are of the same type as those of ``defaults``, by name."""
    known = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
    given = stored if isinstance(stored, Mapping) else {}
    return {name: given[name] for name, kind in known.items() if type(given.get(name)) is kind}
