"""The choice of drafted tokens for a step: those that bring the most tokens a second to all sessions together.

It is the rule of SSSD (arXiv 2411.05894, section 4) with a measured cost in the place of an assumed roofline: with n
sessions, a set S of drafted tokens and q the probability that a token and all before it are right, a step brings
``n + sum of q over S`` tokens in ``T(n + |S|)`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moa_server.scheduling.step_cost import Float64


def choose_nodes(
    drafts: Sequence[Sequence[float]],
    seconds: Callable[[NDArray[np.int64]], Float64],
    *,
    most: int | None = None,
    least_gain: float = 1.0,
) -> list[list[int]]:
    """Choose the tokens of all drafts to verify in a step.

    Tokens are taken by falling path probability, so that what is taken of a tree is a tree; of all numbers of tokens
    that which brings the most tokens a second is the choice. None are looked at one by one, because the seconds of a
    step rise in stairs.

    Args:
        drafts: of each session the probability that a token and all before it are right, for each token of its draft,
            parents before children.
        seconds: of the step with each of some numbers of drafted tokens, ``[n]`` -> ``[n]``.
        most: drafted tokens at most.
        least_gain: tokens a second with drafts by those without, from which on there are any; see
            :class:`~moa_server.scheduling.draft_gain.DraftGain`.

    Returns:
        ascending indices of the chosen tokens of each draft.
    """
    entries = [
        (-probability, session, index)
        for session, draft in enumerate(drafts)
        for index, probability in enumerate(draft)
    ]
    entries.sort()  # of equal ones the parent comes first
    if most is not None:
        del entries[most:]
    chosen: list[list[int]] = [[] for _ in drafts]
    if not entries:
        return chosen
    tokens = len(drafts) + np.cumsum([0.0, *(-entry[0] for entry in entries)])
    rates = tokens / seconds(np.arange(len(entries) + 1))
    count = int(np.argmax(rates))
    if rates[count] < least_gain * rates[0]:
        return chosen
    for _, session, index in entries[:count]:
        chosen[session].append(index)
    for each in chosen:
        each.sort()
    return chosen
