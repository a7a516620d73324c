"""The settings of a chat, how they are stored, and the sampling that they stand for."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moa_runtime.manifest import RecommendedSampling
from moa_runtime.session.events import Grammar, Sampling


@dataclass(frozen=True)
class ChatSettings:
    """Settings of the answers in a chat."""

    system: str = ""  # instructions to the model, perhaps of several lines; empty for none
    max_new_tokens: int = 512  # of every answer
    recommended: bool = True  # sample as the target's authors recommend; temperature and top_p do not count then
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 is no limit
    as_json: bool = False  # whether answers are JSON
    schema: str = ""  # the JSON schema that they conform to; empty for any object

    @property
    def grammar(self) -> Grammar | None:
        """What answers conform to; None for any text."""
        if not self.as_json:
            return None
        return Grammar("json_schema", self.schema) if self.schema.strip() else Grammar("json_object")


def settings_from_json(text: str) -> ChatSettings:
    """Read settings in JSON; a missing or mistyped value gets its default."""
    try:
        stored = json.loads(text)
    except ValueError:
        stored = {}
    return ChatSettings(**well_typed(stored, ChatSettings()))


def well_typed(stored: Any, defaults: ChatSettings) -> dict[str, Any]:
    """Return the values of ``stored`` that have the same type as those of ``defaults``, by name."""
    known = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
    given = stored if isinstance(stored, Mapping) else {}
    return {name: given[name] for name, kind in known.items() if type(given.get(name)) is kind}


def sampling_for(temperature: float, top_p: float, seed: int | None) -> Sampling:
    """Return greedy sampling at temperature 0; otherwise with ``seed``, or a seed drawn for this answer."""
    if not temperature:
        return Sampling()
    return Sampling(temperature, top_p, secrets.randbits(63) if seed is None else seed)


def sampling_of(settings: ChatSettings, recommended: RecommendedSampling | None, seed: int | None) -> Sampling:
    """Return the sampling of a chat with these settings; greedy if the bundle recommends none."""
    chosen = Sampling()
    if not settings.recommended:
        chosen = sampling_for(settings.temperature, settings.top_p, seed)
    elif recommended:
        chosen = sampling_for(recommended.temperature, recommended.top_p, seed)
    return replace(chosen, grammar=settings.grammar)
