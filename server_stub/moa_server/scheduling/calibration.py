"""Calibration of a session's drafts: how often tokens of a claimed probability are right."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moa_runtime.session.tree import depths

#: Bins of claims between 0 and 1, and levels of tokens without a claim.
_BINS, _LEVELS = 10, 8
#: Weight of a claim, in tokens that the target has judged; tokens without a claim are assumed right half of the time.
_TRUST, _UNCLAIMED = 4.0, 0.5
#: Weight that a judged token has lost after another one of its bin.
_FORGETTING = 1 / 200


class Calibration:
    """The share of right tokens by claimed probability, or by level without claims, as the target's verdicts show it.

    Each bin is the mean of a beta distribution that begins at its claim. A client that claims too much gains nothing:
    after some verdicts its tokens count as often as they are right.
    """

    def __init__(self) -> None:
        claims = [(index + 0.5) / _BINS for index in range(_BINS)]
        self._claimed = [[_TRUST * claim, _TRUST] for claim in claims]  # right tokens, judged tokens
        self._unclaimed = [[_TRUST * _UNCLAIMED, _TRUST] for _ in range(_LEVELS)]

    def paths(self, parents: Sequence[int], claims: Sequence[float] | None) -> list[float]:
        """Return the probability that a token of a draft and all before it are right, for each token.

        Args:
            parents: of the tokens, as in :mod:`moa_runtime.session.tree`.
            claims: the drafter's own probability of each token if its parent is right; None if it names none.
        """
        means = [right / judged for right, judged in self._bins(parents, claims)]
        sums = [0.0] * (len(means) + 1)
        for parent, mean in zip(parents, means, strict=True):
            sums[parent] += mean
        if max(sums) > 1:
            means = _exclusive(parents, means)
        paths = [1.0]
        for parent, mean in zip(parents, means, strict=True):
            paths.append(paths[parent] * mean)
        return paths[1:]

    def learn(
        self,
        parents: Sequence[int],
        claims: Sequence[float] | None,
        verified: Collection[int],
        path: Sequence[int],
    ) -> None:
        """Learn from a verdict: tokens that were verified after a right parent are right if they are on the path.

        Args:
            parents, claims: of the whole draft.
            verified, path: indices of its tokens that the target judged, and of the accepted ones.
        """
        right = set(path)
        bins = self._bins(parents, claims)
        for index in verified:
            if not parents[index] or parents[index] - 1 in right:
                found = bins[index]
                found[0] += (index in right) - _FORGETTING * found[0]
                found[1] += 1 - _FORGETTING * found[1]

    def _bins(self, parents: Sequence[int], claims: Sequence[float] | None) -> list[list[float]]:
        if claims is None:
            return [self._unclaimed[min(level, _LEVELS) - 1] for level in depths(parents)]
        return [self._claimed[min(max(int(_BINS * claim), 0), _BINS - 1)] for claim in claims]


def _exclusive(parents: Sequence[int], means: Sequence[float]) -> list[float]:
    """Limit each token to what its likelier siblings leave, for only one of them can be right: otherwise many siblings
    of a new client would be verified for nothing."""
    left, limited = [1.0] * (len(means) + 1), list(means)
    for index in sorted(range(len(means)), key=lambda each: -means[each]):
        limited[index] = min(means[index], left[parents[index]])
        left[parents[index]] -= limited[index]
    return limited
