"""The bound of drafting: the most that any choice of drafted nodes could bring, as a multiple of streaming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def draft_bound(
    sessions: int, step_ms: Mapping[str, float], rounds: int, counts: Mapping[str, Sequence[int]]
) -> float | None:
    """Return the largest ``(n + sum of q) / T(n + |S|)`` over sets ``S`` of drafted nodes, divided by ``n / T(n)``; at
    least 1. None if nothing is known of steps or drafts.

    All steps are taken to be alike: each session offers the mean number of nodes of each probability, and between two
    known numbers of rows ``T`` is a line. A choice that sees each step's own probabilities may bring a little more.

    Args:
        sessions: ``n``, each with one token in every step.
        step_ms: milliseconds of a step by its rows, as in a verifier's status.
        rounds: number of pairs of a session and a step.
        counts: of nodes by the probability ``q`` that they are accepted, in bins of equal width from 0 to 1:
            ``offered`` in drafts, ``verified`` of these, and ``accepted``, which give a bin's measured ``q``.
    """
    if not step_ms or not rounds:
        return None
    rows, ms = np.array(sorted((int(count), each) for count, each in step_ms.items())).T
    offered, verified, accepted = (np.array(counts[name], float) for name in ("offered", "verified", "accepted"))
    middle = (np.arange(len(offered)) + 0.5) / len(offered)
    q = np.divide(accepted, verified, out=middle, where=verified > 0)
    order = np.argsort(-q)
    nodes = np.concatenate(([0.0], np.cumsum(offered[order]))) * sessions / rounds
    tokens = np.concatenate(([0.0], np.cumsum((offered * q)[order]))) * sessions / rounds
    # Both parts are lines between these numbers of nodes, so the largest ratio is at one of them.
    taken = np.concatenate((nodes, rows - sessions)).clip(0.0, min(nodes[-1], max(0.0, rows[-1] - sessions)))
    rates = (sessions + np.interp(taken, nodes, tokens)) / np.interp(sessions + taken, rows, ms)
    return float(rates.max() / rates[0])
