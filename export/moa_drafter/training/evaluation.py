"""Evaluation of a drafter on held-out answers, and its temperature scaling.

Temperature scaling (Guo et al. 2017, arXiv 1706.04599, section 4.2): a target that decodes greedily or at a low
temperature is more certain of its next token than its distribution, on which the drafter is trained. The draft's
probabilities, which decide how many drafted tokens are worth sending, are sharpened to match.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moa_drafter.drafter import Drafter
from moa_drafter.training.batch import Batch, FutureLengths, make_batch
from moa_drafter.training.data import Conversation
from moa_drafter.training.features import Features
from moa_drafter.training.losses import forward_kl


@torch.no_grad()
def drafted(
    drafter: Drafter,
    conversations: Sequence[Conversation],
    features: Features,
    indices: Sequence[int],
    draft_tokens: int,
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield each conversation's batch, its answers drafted ``draft_tokens`` at a time, and the draft logits
    ``[Q, draft_vocab_size]`` of its queries."""
    drafter.eval()
    lengths = FutureLengths(draft_tokens, draft_tokens)
    for index in indices:
        batch = make_batch(conversations, features, [index], lengths, random.Random(0), drafter.head.device)
        yield batch, drafter.logits(drafter.predict(batch))


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    conversations: Sequence[Conversation],
    features: Features,
    validation: Sequence[int],
    *,
    draft_tokens: int = 6,
) -> dict[str, object]:
    """Compute loss, accuracy by depth and tau of a greedy chain on the target's own answers.

    The accepted length of a round is the number of right predictions at the start of its segment; segments that an
    answer's end cuts short do not count for tau.

    Args:
        validation: indices of the conversations.

    Returns:
        ``loss`` (forward KL, nats, mean over conversations), ``tau``, and ``accuracy_by_depth``, a list of
        ``draft_tokens`` shares, None for depths without a token.
    """
    right = torch.zeros(draft_tokens)
    seen = torch.zeros(draft_tokens)
    losses: list[float] = []
    accepted = rounds = 0
    for batch, logits in drafted(drafter, conversations, features, validation, draft_tokens):
        target_logits = drafter.target_logits(batch.states.last[batch.queries])
        losses.append(float(forward_kl(logits, target_logits)))
        guess = drafter.draft_to_target[logits.argmax(-1)]
        hit = (guess == batch.tokens[batch.queries + 1]).cpu()
        depths = batch.depths.cpu()
        right.index_add_(0, depths - 1, hit.float())
        seen.index_add_(0, depths - 1, torch.ones_like(hit, dtype=torch.float32))
        for last in (depths == draft_tokens).nonzero().flatten().tolist():
            accepted += int(hit[last + 1 - draft_tokens : last + 1].long().cumprod(0).sum())
            rounds += 1
    return {
        "loss": sum(losses) / len(losses),
        "tau": 1 + accepted / max(1, rounds),
        "accuracy_by_depth": [round(float(r / s), 4) if s else None for r, s in zip(right, seen, strict=True)],
    }


_FACTORS = torch.arange(10, 51) / 20  # 0.5 to 2.5


@torch.no_grad()
def fitted_sharpness(
    drafter: Drafter,
    conversations: Sequence[Conversation],
    features: Features,
    indices: Sequence[int],
    *,
    draft_tokens: int = 6,
) -> float:
    """Return the factor on the draft logits, a multiple of 0.05 from 0.5 to 2.5, that makes the target's answers
    likeliest, drafted by ``draft_tokens``. Tokens that cannot be drafted do not count.

    Args:
        indices: conversations that the drafter was not trained on.
    """
    device = drafter.head.device
    factors = _FACTORS.to(device)
    drafted_as = torch.full((len(drafter.embedding),), -1, device=device)
    drafted_as[drafter.draft_to_target] = torch.arange(len(drafter.draft_to_target), device=device)
    likelihood = torch.zeros(len(factors), device=device)
    for batch, logits in drafted(drafter, conversations, features, indices, draft_tokens):
        wanted = drafted_as[batch.tokens[batch.queries + 1]]
        logits, wanted = logits[wanted >= 0].float(), wanted[wanted >= 0]
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        likelihood += torch.stack([(f * chosen - (f * logits).logsumexp(-1)).sum() for f in factors])
    return round(float(factors[likelihood.argmax()]), 2)
