"""Drafts as tests like them."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafters.base import Budget, Drafter, DraftToken
from moa_runtime.session.tree import DraftTree


def draft_of(drafter: Drafter, prefix: Sequence[int], count: int) -> list[DraftToken]:
    """A chain of at most ``count`` tokens."""
    return tokens_of(drafter.propose(prefix, Budget.chain(count, nodes=count)))


def tokens_of(chain: DraftTree) -> list[DraftToken]:
    """The tokens of a chain, each with its own log-probability."""
    before = (0.0, *chain.scores)
    return [
        DraftToken(token, score - last)
        for token, score, last in zip(chain.tokens, chain.scores, before[:-1], strict=True)
    ]


def path_of(tree: DraftTree) -> list[int]:
    """Tokens of the likeliest path."""
    return [tree.tokens[index] for index in tree.likeliest_path()]
