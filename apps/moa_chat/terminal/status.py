"""The words and colours around an answer: status line, summary, how tentative text looks."""

from __future__ import annotations

import os
import statistics as stats
from dataclasses import dataclass

from moa_chat.strings import is_late
from moa_chat.terminal.renderer import Span
from moa_runtime.events import AnswerUpdate, FinishReason, LinkChanged, LinkStatus, Origin, Statistics

_RECENT_TRIPS = 8
_FINISH = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut off at --max-new-tokens",
    FinishReason.CONTEXT: "the target's context is full",
}


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
        """``NO_COLOR`` leaves dim, italic and underlined."""
        if os.environ.get("NO_COLOR"):
            return cls(offline="2;3;4", error="", online="", reconnecting="", away="")
        return cls()

    def of_link(self, link: LinkStatus) -> str:
        return {
            LinkStatus.ONLINE: self.online,
            LinkStatus.RECONNECTING: self.reconnecting,
            LinkStatus.OFFLINE: self.away,
        }[link]


def tentative_spans(update: AnswerUpdate, palette: Palette) -> list[Span]:
    """The update's tentative text: what was drafted online, and what was written offline."""
    unconfirmed = [span for span in update.spans if not span.committed]
    return [
        Span(span.text, palette.tentative if span.origin is Origin.DRAFTED else palette.offline) for span in unconfirmed
    ]


def figures(statistics: Statistics) -> str:
    """Such as ``tau 2.31 | 14.2 tokens/s | 12 rounds | rtt 63 ms``."""
    parts = [f"tau {statistics.tau:.2f}", f"{statistics.tokens_per_second:.1f} tokens/s", f"{statistics.rounds} rounds"]
    if statistics.round_trips:
        # From sending to the verdict: the network and the target together.
        waited = 1000 * stats.median(statistics.round_trips[-_RECENT_TRIPS:])
        parts.append("server drafts" if statistics.server_drafts else f"rtt {waited:.0f} ms")
    return " | ".join(parts)


def status_line(link: LinkChanged, words: str, update: AnswerUpdate | None, palette: Palette) -> list[Span]:
    """The link, in ``words``, and figures of the answer that is being written."""
    late = is_late(link)
    spans = [Span(words, palette.reconnecting if late else palette.of_link(link.status))]
    if update is not None:
        spans.append(Span(f" | {figures(update.statistics)}", palette.quiet))
        unconfirmed = sum(not token.committed for token in update.tokens)
        if unconfirmed and (late or link.status is not LinkStatus.ONLINE):
            spans.append(Span(f" | {unconfirmed} tentative", palette.offline))
    return spans


def summary(reason: FinishReason | None, statistics: Statistics) -> str:
    """The line after an answer; ``reason`` is None for one that was stopped."""
    parts = [f"{statistics.tokens} tokens in {statistics.seconds:.1f} s", figures(statistics)]
    if statistics.offline:
        parts.append(f"{statistics.offline} written offline")
    if statistics.rolled_back:
        parts.append(f"{statistics.rolled_back} rolled back")
    if note := "stopped" if reason is None else _FINISH[reason]:
        parts.insert(0, note)
    return " | ".join(parts)
