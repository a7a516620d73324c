"""The answer on the screen: what is known of it, and the words and colours around it."""

from __future__ import annotations

import json
import os
import statistics as stats
import time
from dataclasses import dataclass

from moa_chat import strings
from moa_chat.terminal.renderer import Span
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    Disagreement,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Paused,
    PauseReason,
    Statistics,
)

_RECENT_TRIPS = 8


@dataclass(frozen=True)
class Palette:
    """ANSI styles. Tentative text is dim and italic; written offline, it also has a colour."""

    tentative: str = "2;3"
    offline: str = "2;3;33"
    quiet: str = "2"
    error: str = "31"
    online: str = "32"
    reconnecting: str = "33"
    away: str = "31"

    @classmethod
    def from_environment(cls) -> Palette:
        """Return the palette; with ``NO_COLOR`` only dim, italic and underlined."""
        if os.environ.get("NO_COLOR"):
            return cls(offline="2;3;4", error="", online="", reconnecting="", away="")
        return cls()

    def of_link(self, link: LinkStatus) -> str:
        styles = {LinkStatus.ONLINE: self.online, LinkStatus.RECONNECTING: self.reconnecting}
        return styles.get(link, self.away)


def figures(statistics: Statistics) -> str:
    """Return figures such as ``tau 2.31 | 14.2 tokens/s | 12 rounds | rtt 63 ms``."""
    parts = [f"tau {statistics.tau:.2f}", f"{statistics.tokens_per_second:.1f} tokens/s", f"{statistics.rounds} rounds"]
    if statistics.round_trips:
        # From sending to the verdict: the network and the target together.
        waited = 1000 * stats.median(statistics.round_trips[-_RECENT_TRIPS:])
        parts.append("server drafts" if statistics.streamed else f"rtt {waited:.0f} ms")
    return " | ".join(parts)


def status_line(link: LinkChanged, words: str, update: AnswerUpdate | None, palette: Palette) -> list[Span]:
    """Return the link, in ``words``, and figures of the answer that is being written."""
    spans = [Span(words, palette.reconnecting if link.late else palette.of_link(link.status))]
    if update is not None:
        spans.append(Span(f" | {figures(update.statistics)}", palette.quiet))
        unconfirmed = tentative_tokens(update)
        if unconfirmed and (link.late or link.status is not LinkStatus.ONLINE):
            spans.append(Span(f" | {unconfirmed} tentative", palette.offline))
    return spans


def tentative_tokens(update: AnswerUpdate) -> int:
    return sum(not token.committed for token in update.tokens)


def ending(reason: FinishReason | None, text: str = "", *, as_json: bool = False) -> str:
    """Return why an answer ended before its end, and whether it is no JSON for that; empty if it is complete.

    Args:
        reason: None if it was stopped.
        text: without reasoning.
        as_json: whether it was to be JSON.
    """
    note = strings.STOPPED if reason is None else strings.TERMINAL_FINISH[reason]
    if note and as_json:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return strings.NO_JSON.format(note)
    return note


def summary(note: str, statistics: Statistics) -> str:
    """Return the line after an answer; ``note``: see :func:`ending`."""
    parts = [note] if note else []
    parts += [f"{statistics.tokens} tokens in {statistics.seconds:.1f} s", figures(statistics)]
    if statistics.drafted:
        parts.append(f"{statistics.accepted} of {statistics.drafted} drafted tokens used")
    if statistics.dropped_turns:
        parts.append(strings.WITHOUT_OLDEST.format(statistics.dropped_turns))
    if statistics.offline:
        parts.append(f"{statistics.offline} written offline")
    if statistics.rolled_back:
        parts.append(f"{statistics.rolled_back} rolled back")
    return " | ".join(parts)


class AnswerState:
    """Takes a chat's events, and returns what to draw."""

    def __init__(self, link: LinkChanged) -> None:
        self.confirmed = ""  # text of the answer
        self.reason: FinishReason | None = None  # of its end; None before, and for one that was stopped
        self.statistics = Statistics()
        self.disagreement: Disagreement | None = None  # that the user may still decide on
        self._link, self._link_since = link, time.monotonic()
        self._update: AnswerUpdate | None = None
        self._pause: PauseReason | None = None

    def take(self, event: ChatEvent) -> None:
        if isinstance(event, LinkChanged):
            self._link, self._link_since = event, time.monotonic()
        elif isinstance(event, Disagreement):
            self.disagreement = event
        elif isinstance(event, Paused):
            self._pause = event.reason
        elif isinstance(event, AnswerUpdate):
            if self._update is None or _text(event) != _text(self._update):
                self._pause = None  # a pause lasts if only an origin has changed, as when a late link is lost
            self._update = event
            self.confirmed, self.statistics = event.committed, event.statistics
        elif isinstance(event, AnswerFinished):
            self._update, self._pause = None, None
            self.confirmed, self.statistics, self.reason = event.text, event.statistics, event.reason

    @property
    def left_behind(self) -> str:
        """Unconfirmed text of the device, in an answer that was stopped."""
        spans = () if self._update is None else self._update.spans
        return "".join(each.text for each in spans if each.origin is Origin.OFFLINE and not each.committed)

    @property
    def tentative_tokens(self) -> int:
        """Number of tokens that are not confirmed, in an answer that was stopped."""
        return 0 if self._update is None else tentative_tokens(self._update)

    def ended_alone(self, *, wanted_offline: bool) -> bool:
        """Return whether the device has completed the answer without the verifier, or reached its offline limit."""
        ends = (PauseReason.END, PauseReason.LENGTH, *([PauseReason.LIMIT] if wanted_offline else []))
        return bool(self.left_behind) and self._pause in ends

    @property
    def at_limit(self) -> bool:
        """Whether the device may write no more of the answer until the verifier is back."""
        return bool(self.left_behind) and self._pause is PauseReason.LIMIT

    @property
    def away(self) -> bool:
        """Whether the verifier is away."""
        return self._link.status is LinkStatus.OFFLINE

    def words_left(self, *, checked: bool) -> str:
        """Return a sentence about :attr:`left_behind`: how long it is, and whether it is checked later."""
        count = len(self.left_behind.split())
        words = strings.ONE_WORD if count == 1 else strings.WORDS.format(count)
        limit = strings.LIMIT_REACHED if self._pause is PauseReason.LIMIT else ""
        later = strings.CHECKED_LATER if checked else strings.STAYS
        return strings.WORDS_ALONE.format(words=words, limit=limit, later=later)

    def tentative(self, palette: Palette) -> list[Span]:
        """Return the text after the confirmed one: drafted online, or written offline."""
        styles, spans = {Origin.DRAFTED: palette.tentative}, self._update.spans if self._update is not None else ()
        return [Span(each.text, styles.get(each.origin, palette.offline)) for each in spans if not each.committed]

    def status(self, palette: Palette, *, wanted_offline: bool, hint: str) -> list[Span]:
        """Return the row below the answer; ``hint`` names keys. It may be cut off, so figures come after what one needs
        to act, and the longest part last."""
        link = self._link
        left = None
        if link.retry_in_s is not None:
            left = max(0.0, self._link_since + link.retry_in_s - time.monotonic())
        words = strings.link_words(link, left, wanted_offline=wanted_offline)
        pause = strings.PAUSES[self._pause] if self._pause else ""
        row = status_line(link, words, self._update, palette)
        keys, why = ([Span(f" | {note}", palette.quiet)] if note else [] for note in (hint, pause))
        told = (link.late or link.status is LinkStatus.OFFLINE) and link.detail and not (pause or wanted_offline)
        last = [Span(f" | {link.detail}", palette.quiet)] if told else []
        return [row[0], *why, *keys, *row[1:], *last]


def _text(update: AnswerUpdate) -> str:
    return update.committed + update.tentative
