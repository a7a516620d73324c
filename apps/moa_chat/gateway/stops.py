"""Stop texts: where one begins, an answer ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on, but nothing that is, or may still become, a stop text.

    Example: with the stop text "END", ``feed`` of "the E", "N", "D of" returns "the ", "", "".

    Attributes:
        stopped: whether a stop text has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; returns what is certain now, perhaps none."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        return self._release(min(found) if found else len(self._held) - self._open_length())

    def finish(self) -> str:
        """The text held back, when no more comes."""
        return "" if self.stopped else self._release(len(self._held))

    def _open_length(self) -> int:
        """Length of the longest end of the text that a stop text begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((length for length in ends if self._begins_stop(self._held[-length:])), 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
