"""Counting outages: agreement, perplexity and repetition of what was written, and what was kept of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_bench.result import rounded
from moa_runtime.tokens import common_length

#: Length of the n-grams that tell how much a text repeats itself.
NGRAM = 4


@dataclass(frozen=True)
class Text:
    """Tokens, and the target's log-probability of each (nats, float32 ``[n]``)."""

    tokens: list[int]
    log_probabilities: NDArray[np.float32]

    def first(self, count: int) -> Text:
        """The first ``count`` tokens, fewer of a shorter text."""
        return Text(self.tokens[:count], self.log_probabilities[:count])


class TextTally:
    """Perplexity and repetition over many texts, in which every token counts alike."""

    def __init__(self) -> None:
        self.tokens = 0
        self._nats = 0.0
        self._ngrams = 0
        self._distinct = 0

    def add(self, text: Text) -> None:
        ngrams = [tuple(text.tokens[start : start + NGRAM]) for start in range(len(text.tokens) - NGRAM + 1)]
        self.tokens += len(text.tokens)
        self._nats -= float(text.log_probabilities.sum(dtype=np.float64))
        self._ngrams += len(ngrams)
        self._distinct += len(set(ngrams))

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability of a token; None without tokens."""
        return math.exp(self._nats / self.tokens) if self.tokens else None

    @property
    def distinct(self) -> float | None:
        """The share of 4-grams that their text did not hold before; None if no text was that long."""
        return self._distinct / self._ngrams if self._ngrams else None


class Tally:
    """One writer at one length, over many outages.

    Example: at length 3 one text of 3 tokens begins with 2 of the target's, and the target keeps these 2;
    another has 1 token, a wrong one. Then 2 tokens are written on average, the agreement is 1 token, and
    the share kept is 2 of 4.
    """

    def __init__(self) -> None:
        self._outages = 0
        self._agreed = 0
        self._kept = 0
        self._written = TextTally()
        self._target = TextTally()

    def add(self, written: Text, kept: int, target: Text) -> None:
        """Count one outage.

        Args:
            written: what was written, cut to this tally's length.
            kept: how many tokens of it were kept after reconnecting.
            target: the target's own continuation. Of a longer one, as many tokens count as were written.
        """
        self._outages += 1
        self._agreed += common_length(written.tokens, target.tokens)
        self._kept += kept
        self._written.add(written)
        self._target.add(target.first(len(written.tokens)))

    def as_dict(self) -> dict[str, Any]:
        """Plain figures for JSON; None where nothing was written."""
        perplexity, target_perplexity = self._written.perplexity, self._target.perplexity
        ratio = perplexity / target_perplexity if perplexity and target_perplexity else None
        return {
            "written": self._mean(self._written.tokens),
            "agreement": self._mean(self._agreed),
            "kept": self._mean(self._kept),
            "share_kept": rounded(self._kept / self._written.tokens if self._written.tokens else None),
            "perplexity": rounded(perplexity),
            "target_perplexity": rounded(target_perplexity),
            "perplexity_ratio": rounded(ratio),
            "distinct": rounded(self._written.distinct),
            "target_distinct": rounded(self._target.distinct),
        }

    def _mean(self, total: int) -> float | None:
        return rounded(total / self._outages if self._outages else None)
