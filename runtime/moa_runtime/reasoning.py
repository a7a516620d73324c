"""Reasoning in an answer: the text between ``<think>`` and ``</think>`` at its beginning, as Qwen 3 writes it.

Other targets tell it by control tokens without text: channels of gpt-oss, marks of Gemma 4 and Mistral. In an answer's
text the marks of Qwen 3 stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from moa_runtime.tokens import open_length

OPEN, CLOSE = "<think>", "</think>"
#: The template's variable by which a user switches reasoning on or off.
ENABLE_THINKING = "enable_thinking"
#: White space around the parts; the same in other languages, whose own ideas of it differ.
_SPACE = " \t\n\r"

#: Whether answers have reasoning: they begin inside it, they may begin with its mark, or they have none.
Thought = Literal["begun", "may", ""]
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


class Reasoned(NamedTuple):
    """An answer in its two parts, without the marks and the white space around them."""

    reasoning: str
    answer: str


def split_reasoning(text: str, *, begun: bool = False, final: bool = True) -> Reasoned:
    """Split an answer's text. Reasoning that has no end takes all of it.

    Example: ``split_reasoning("<think>\\nTwo.\\n</think>\\n\\n2")`` is ``("Two.", "2")``.

    Args:
        begun: whether the prompt ends with the opening mark, so that the text begins inside.
        final: whether the text is whole; else an end that may become a mark is left out of both parts.
    """
    body = text.lstrip(_SPACE)
    if not final and body != OPEN and OPEN.startswith(body):
        return Reasoned("", "")
    if not (begun or body.startswith(OPEN)):
        return Reasoned("", text)
    reasoning, closed, answer = body.removeprefix(OPEN).partition(CLOSE)
    if not closed and not final:
        reasoning = reasoning[: len(reasoning) - open_length(reasoning, (CLOSE,))]
    return Reasoned(reasoning.strip(_SPACE), answer.lstrip(_SPACE))


def reasoning_end(text: str, *, begun: bool = False) -> int:
    """Return the number of characters of an answer's text that are reasoning, its marks included."""
    if not (begun or text.lstrip(_SPACE).startswith(OPEN)):
        return 0
    end = text.find(CLOSE)
    return len(text) if end < 0 else end + len(CLOSE)


def seems_begun(text: str) -> bool:
    """Return whether an answer seems to begin inside its reasoning: its first mark is the closing one."""
    end = text.find(CLOSE)
    return end >= 0 and OPEN not in text[:end]


class ReasoningSplitter:
    """Splits an answer that comes piece by piece. ``begun``: see :func:`split_reasoning`."""

    def __init__(self, *, begun: bool = False) -> None:
        self._begun, self._text, self._sent = begun, "", Reasoned("", "")

    def feed(self, text: str, *, final: bool = False) -> Reasoned:
        """Add text; return what is certain now and was not returned before."""
        self._text += text
        before, self._sent = self._sent, split_reasoning(self._text, begun=self._begun, final=final)
        return Reasoned(self._sent.reasoning[len(before.reasoning) :], self._sent.answer[len(before.answer) :])


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
