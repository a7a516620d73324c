"""Training losses; each is a mean over positions, so that weights carry over."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

#: ``(draft hidden [Q, h], draft logits [Q, v], target hidden [Q, h], target logits [Q, v]) -> scalar``.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Compute the forward KL divergence (nats) from target to draft over the draft vocabulary."""
    return nn.functional.kl_div(
        draft_logits.float().log_softmax(-1),
        target_logits.float().log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )


def rejection_rate(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Compute the rejection rate of speculative sampling: the total variation distance (arXiv 2211.17192)."""
    gap = draft_logits.float().softmax(-1) - target_logits.float().softmax(-1)
    return 0.5 * gap.abs().sum(-1).mean()


#: By the name that ``moa-train --loss`` takes.
LOSSES: dict[str, Loss] = {
    "kl": lambda hidden, logits, target_hidden, target_logits: forward_kl(logits, target_logits),
    # As in arXiv 2410.03804 and EAGLE (arXiv 2401.15077).
    "feature": lambda hidden, logits, target_hidden, target_logits: (
        nn.functional.smooth_l1_loss(hidden.float(), target_hidden.float()) + 0.1 * forward_kl(logits, target_logits)
    ),
    # The KL divergence keeps gradients alive when the draft is far off.
    "acceptance": lambda hidden, logits, target_hidden, target_logits: (
        rejection_rate(logits, target_logits) + 0.1 * forward_kl(logits, target_logits)
    ),
}
