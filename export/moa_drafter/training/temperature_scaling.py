"""How sure of itself a drafter should be: temperature scaling (Guo et al. 2017, arXiv 1706.04599, section 4.2).

Training compares distributions. A target that decodes greedily, or at a low temperature, is surer of its next token
than its distribution says, and so should be what decides which drafted tokens are worth sending.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moa_drafter.drafter import Drafter
from moa_drafter.training.data import Conversation
from moa_drafter.training.evaluation import drafted
from moa_drafter.training.features import Features

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
    """The factor on the draft logits under which the target's answers are likeliest, drafted by ``draft_tokens``.

    Tokens that cannot be drafted do not count.

    Args:
        indices: conversations that the drafter was not trained on.

    Returns:
        a multiple of 0.05 from 0.5 to 2.5.
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
