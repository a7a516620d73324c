"""An answer's statistics in words and rounds."""

from __future__ import annotations

import statistics as stats
from dataclasses import dataclass

from moa_runtime.events import FinishReason, Statistics

#: Of an answer that the device wrote, and that the user kept or the verifier refused.
AS_WRITTEN = "as this device wrote it, not confirmed"
_RECENT_TRIPS = 8
_FINISH = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut off at its greatest length",
    FinishReason.CONTEXT: "the target's context is full",
}


@dataclass(frozen=True)
class Figure:
    """One figure of the panel, with what it means."""

    text: str
    meaning: str


@dataclass(frozen=True)
class Round:
    """One or more rounds that were seen together: seconds, and tokens committed in each of them."""

    round_trip_s: float
    committed: float


def round_trip(statistics: Statistics) -> float:
    """Median of the latest round trips in seconds, 0 without any: network and target together."""
    return stats.median(statistics.round_trips[-_RECENT_TRIPS:]) if statistics.round_trips else 0.0


def figures(statistics: Statistics, words_a_token: float) -> list[Figure]:
    """What the panel says of an answer. A person counts words; what is drafted are pieces of them, the tokens."""
    speed = words_a_token * generation_speed(statistics)
    shown = [Figure(f"{speed:.1f} words a second", "behind the first ones")]
    if statistics.first_token_seconds is not None:
        shown.append(Figure(f"first word after {statistics.first_token_seconds:.2f} s", "from the question to it"))
    for who, drafted, accepted in (
        ("this device", statistics.drafted, statistics.accepted),
        ("the server", statistics.server_drafted, statistics.server_accepted),
    ):
        if drafted:
            says = f"{accepted} of {drafted} pieces of words drafted by {who} were right"
            shown.append(Figure(says, "the others were corrected before they counted"))
    if statistics.rounds:
        written = statistics.tokens - statistics.kept - statistics.fetched + statistics.taken_back
        says = f"{written} pieces of words in {statistics.rounds} passes of the model"
        shown.append(Figure(says, f"without drafts it would be a pass for each; τ = {statistics.tau:.2f}"))
    if statistics.round_trips:
        waited = f"{1000 * round_trip(statistics):.0f} ms"
        if statistics.server_drafts:
            shown.append(Figure(f"something new every {waited}", "the server drafts now, and goes on by itself"))
        else:
            shown.append(Figure(f"an answer from the server after {waited}", "network and model together"))
    shown.append(
        Figure(
            f"{_size(statistics.bytes_up)} sent, {_size(statistics.bytes_down)} received", "for this answer, all told"
        )
    )
    return shown


def generation_speed(statistics: Statistics) -> float:
    """Tokens per second behind the first verdict, whose waiting time is a figure of its own; 0 before the second."""
    seconds = statistics.seconds - (statistics.first_token_seconds or 0.0)
    return max(statistics.tokens - 1, 0) / seconds if seconds > 0 else 0.0


def new_round(before: Statistics, after: Statistics) -> Round | None:
    """What the rounds between two snapshots of one answer brought; None when there were none."""
    rounds = after.rounds - before.rounds
    if rounds <= 0 or not after.round_trips:
        return None
    return Round(after.round_trips[-1], (after.tokens - before.tokens) / rounds)


def summary(statistics: Statistics, reason: FinishReason | None) -> str:
    """What is remarkable about an answer, for the line beneath it; ``reason`` is None for one that was stopped."""
    kept, offline = statistics.kept, statistics.offline
    parts = [
        "stopped" if reason is None else _FINISH[reason],
        ("" if kept == statistics.tokens else "partly ") + AS_WRITTEN if kept else "",
        "partly written offline" if offline > kept else "",
        "corrected by the server" if offline and statistics.rolled_back and not kept else "",
    ]
    return " · ".join(part for part in parts if part)


def _size(count: float) -> str:
    """Bytes in the unit that reads best: ``_size(12_300)`` is ``"12 kB"``."""
    if count < 1e3:
        return f"{count:.0f} B"
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB"
