"""One mode against another over the same questions, as a ratio with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_RESAMPLES = 4000
_PERCENTILES = (2.5, 97.5)
#: Modes that a user may choose between, of which ``auto`` should be the best.
_RIVALS = ("stream", "device", "server")


def of_auto(answers: Mapping[str, Sequence[float | None]]) -> dict[str, Any] | None:
    """``auto`` against ``stream``, and against the best of what else there is to choose.

    Args:
        answers: by mode, seconds a token of each answer, all modes in the same order of questions; None for an
            answer of one token. An answer that not all modes have yet counts for none.

    Returns:
        ``stream`` and ``best``: ``ratio`` of the means (below 1: ``auto`` is faster), ``low`` and ``high``, ends of the
        95 % bootstrap interval over questions; ``best`` also has its ``mode``. None without ``auto`` or a rival, or
        with fewer than two answers.
    """
    rivals = [mode for mode in _RIVALS if mode in answers]
    if "auto" not in answers or not rivals:
        return None
    pairs = list(zip(*(answers[mode] for mode in ("auto", *rivals)), strict=False))
    seconds = np.array([pair for pair in pairs if None not in pair], dtype=np.float64)
    if len(seconds) < 2:
        return None
    means = seconds.mean(axis=0)
    best = 1 + int(means[1:].argmin())
    found: dict[str, Any] = {"best": {"mode": rivals[best - 1], **_ratio(seconds[:, 0], seconds[:, best])}}
    if "stream" in rivals:
        found["stream"] = _ratio(seconds[:, 0], seconds[:, 1 + rivals.index("stream")])
    return found


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    drawn = np.random.default_rng(0).integers(0, len(ours), (_RESAMPLES, len(ours)))
    low, high = np.percentile(ours[drawn].mean(axis=1) / theirs[drawn].mean(axis=1), _PERCENTILES)
    ratio = ours.mean() / theirs.mean()
    return {"ratio": round(float(ratio), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
