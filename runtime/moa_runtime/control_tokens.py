"""Control tokens that tell an answer's reasoning from the rest: channels of gpt-oss, marks of Gemma 4 and Mistral.

Such tokens have no text. In an answer's text the marks of :mod:`moa_runtime.reasoning` stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from moa_runtime.reasoning import CLOSE, OPEN

Role = Literal["open", "open named", "close", "header", "message", "end"]
#: Roles by text. After "open named" the rest of the line is a channel's name.
_MARKS: Mapping[str, Role] = {
    "<think>": "open",
    "</think>": "close",
    "[THINK]": "open",
    "[/THINK]": "close",
    "<|channel>": "open named",
    "<channel|>": "close",
}
#: Of the format Harmony: ``<|channel|>``, a channel's name, perhaps more, ``<|message|>``, the text, ``<|end|>``.
_HARMONY: Mapping[str, Role] = {
    "<|start|>": "header",
    "<|channel|>": "header",
    "<|message|>": "message",
    "<|end|>": "end",
}
_REASONING_CHANNEL = "analysis"


class ControlState(NamedTuple):
    """What has come so far of an answer.

    Attributes:
        inside: "header" or "name" while tokens have no text of the answer.
        header: the text of the header so far.
        reasoning: whether reasoning is open.
        answered: whether the answer has begun.
    """

    inside: Literal["text", "header", "name"] = "text"
    header: str = ""
    reasoning: bool = False
    answered: bool = False


class ControlTokens:
    """What stands in the place of an answer's tokens.

    Example (gpt-oss): ``<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>2`` is
    ``<think>Two.</think>2``. Of the channels of gpt-oss only ``analysis`` is reasoning; a call of a tool stays text.

    Args:
        special: ids of special tokens by text.
        decode: returns the text of a token.
    """

    def __init__(self, special: Mapping[str, int], decode: Callable[[int], str]) -> None:
        known = {**_MARKS, **(_HARMONY if _HARMONY.keys() <= special.keys() else {})}
        self._roles = {special[text]: role for text, role in known.items() if text in special}
        self._decode = decode

    def __bool__(self) -> bool:
        """Whether there are any such tokens."""
        return bool(self._roles)

    def step(self, state: ControlState, token: int) -> tuple[ControlState, str | None]:
        """Take a token; return the new state and what stands in the token's place, None for its own text."""
        role = self._roles.get(token)
        if role is None:
            return self._ordinary(state, token)
        if role in ("header", "end"):
            return state._replace(inside="header", header=""), ""
        if role == "message":
            opens = state.header.split()[:1] == [_REASONING_CHANNEL] and not state.answered
        else:
            opens = role != "close"
        state = state._replace(inside="name" if role == "open named" else "text")
        if opens:
            return state._replace(reasoning=True), "\n\n" if state.reasoning else OPEN
        piece = CLOSE if state.reasoning or role == "close" else "\n\n" if state.answered else ""
        return state._replace(reasoning=False, answered=True), piece

    def _ordinary(self, state: ControlState, token: int) -> tuple[ControlState, str | None]:
        if state.inside == "text":
            return state, None
        if state.inside == "header":
            return state._replace(header=state.header + self._decode(token)), ""
        _, ended, text = self._decode(token).partition("\n")
        return state._replace(inside="text" if ended else "name"), text
