"""Stop texts: where one begins, an answer ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on, but nothing that is, or may still become, a stop text.

    The text ends at the stop text that is complete first, as if it came character by character; if several are complete
    with one character, at the longest of them. So the pieces in which the text comes make no difference.

    Example: with the stop text "END", ``feed`` of "the E", "N", "D of" returns "the ", "", "", and ``end`` is 7.

    Attributes:
        end: characters up to the end of the stop text, itself included; None while none has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.end: int | None = None
        self._stops = stops
        self._held, self._passed_on = "", 0

    def feed(self, text: str) -> str:
        """Add text; returns what is certain now, perhaps none."""
        if self.end is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return self._release(len(self._held) - self._open_length())
        end, at = min(found)
        self.end = self._passed_on + end
        return self._release(at)

    def finish(self) -> str:
        """The text held back, when no more comes."""
        return self._release(len(self._held)) if self.end is None else ""

    def _open_length(self) -> int:
        """Length of the longest end of the text that a stop text begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((length for length in ends if self._begins_stop(self._held[-length:])), 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._passed_on += length
        return text
