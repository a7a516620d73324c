"""What the answers of one mode over one connection came to."""

from __future__ import annotations

from typing import Any

from moa_bench.latency import mean_ms, percentile_ms, token_latencies
from moa_bench.network.ask import Outcome
from moa_bench.result import rounded


class Tally:
    """Adds up answers. Every figure per token is over all tokens of all answers, so long answers weigh more.

    *Latency*: see :func:`moa_bench.latency.token_latencies`; an answer's first token has none, but the time
    to it. *Gap*: the longest silence between two messages of an answer. *Round*: a message of the device
    behind the question, and its verdict; so the first token belongs to no round.
    """

    def __init__(self) -> None:
        self.answers = 0
        self.identical = True
        self._tokens = self._passes = self._bytes_up = self._bytes_down = 0
        self._rounds = self._tokens_of_rounds = 0
        self._first: list[float] = []
        self.seconds_a_token: list[float | None] = []  # of each answer; None where it has one token
        self._latencies: list[float] = []
        self._gaps: list[float] = []

    def add(self, outcome: Outcome) -> None:
        answer = outcome.answer
        self.answers += 1
        self.identical &= outcome.identical
        self._tokens += len(answer.tokens)
        self._passes += outcome.passes
        self._bytes_up += outcome.bytes_up
        self._bytes_down += outcome.bytes_down
        self._first.append(answer.bursts[0].at - answer.sent)
        later = answer.bursts[1:]
        latencies = token_latencies(answer.bursts)
        self._latencies += latencies
        self.seconds_a_token.append(sum(latencies) / len(latencies) if latencies else None)
        if later:
            self._gaps.append(max(b.at - a.at for a, b in zip(answer.bursts, later, strict=False)))
        if outcome.in_rounds:
            self._rounds += len(later)
            self._tokens_of_rounds += sum(burst.tokens for burst in later)

    def as_dict(self) -> dict[str, Any]:
        """Plain figures for JSON; null where there is nothing to tell."""
        return {
            "answers": self.answers,
            "tokens": self._tokens,
            "ttft_ms": mean_ms(self._first),
            "ms_per_token": {
                "mean": mean_ms(self._latencies),
                "p50": percentile_ms(self._latencies, 50),
                "p95": percentile_ms(self._latencies, 95),
            },
            "longest_gap_ms": mean_ms(self._gaps),
            "tokens_per_round": rounded(_ratio(self._tokens_of_rounds, self._rounds)),
            "passes_per_token": rounded(_ratio(self._passes, self._tokens)),
            "bytes_up_per_token": rounded(_ratio(self._bytes_up, self._tokens), 1),
            "bytes_down_per_token": rounded(_ratio(self._bytes_down, self._tokens), 1),
            "identical": self.identical if self.answers else None,
        }


def _ratio(total: int, count: int) -> float | None:
    return total / count if count else None
