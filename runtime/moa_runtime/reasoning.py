"""Reasoning in an answer: the text between ``<think>`` and ``</think>`` at its beginning, as Qwen 3 writes it."""

from __future__ import annotations

from typing import NamedTuple

from moa_runtime.tokens import open_length

OPEN, CLOSE = "<think>", "</think>"
#: The template's variable by which a user switches reasoning on or off.
ENABLE_THINKING = "enable_thinking"
#: White space around the parts; the same in other languages, whose own ideas of it differ.
_SPACE = " \t\n\r"


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


class ReasoningSplitter:
    """Splits an answer that comes piece by piece. ``begun``: see :func:`split_reasoning`."""

    def __init__(self, *, begun: bool = False) -> None:
        self._begun, self._text, self._sent = begun, "", Reasoned("", "")

    def feed(self, text: str, *, final: bool = False) -> Reasoned:
        """Add text; return what is certain now and was not returned before."""
        self._text += text
        before, self._sent = self._sent, split_reasoning(self._text, begun=self._begun, final=final)
        return Reasoned(self._sent.reasoning[len(before.reasoning) :], self._sent.answer[len(before.answer) :])
