"""What training makes small. Every loss is a mean over positions, so that weights carry over."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

#: ``(draft hidden [Q, h], draft logits [Q, v], target hidden [Q, h], target logits [Q, v]) -> scalar``.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Forward KL divergence from target to draft over the draft vocabulary, mean over positions (nats)."""
    return nn.functional.kl_div(
        draft_logits.float().log_softmax(-1),
        target_logits.float().log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )


def rejection_rate(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Total variation distance: how often speculative sampling rejects a token (arXiv 2211.17192, theorem 3.5)."""
    gap = draft_logits.float().softmax(-1) - target_logits.float().softmax(-1)
    return 0.5 * gap.abs().sum(-1).mean()


#: By the name that ``moa-train --loss`` takes.
LOSSES: dict[str, Loss] = {
    "kl": lambda hidden, logits, target_hidden, target_logits: forward_kl(logits, target_logits),
    # arXiv 2410.03804 and EAGLE (arXiv 2401.15077): features, and a tenth of the classification.
    "feature": lambda hidden, logits, target_hidden, target_logits: (
        nn.functional.smooth_l1_loss(hidden.float(), target_hidden.float()) + 0.1 * forward_kl(logits, target_logits)
    ),
    # The KL divergence keeps gradients alive where the draft is far off.
    "acceptance": lambda hidden, logits, target_hidden, target_logits: (
        rejection_rate(logits, target_logits) + 0.1 * forward_kl(logits, target_logits)
    ),
}
