"""All of a model as a drafter that looks at tokens alone: what a device writes with while it has no verifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moa_drafter.architectures.independent import IndependentConfig, IndependentDrafter
from moa_drafter.compatibility import FitError
from moa_drafter.config import check_copied_exactly, config_for_target
from moa_drafter.llama import run_layers
from moa_drafter.target import Target
from moa_drafter.target_trial import deviation

#: Tokens that the copy is tried with, and how far it may be from the target, relative to the size of its logits.
_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@torch.no_grad()
def whole_model(target: Target) -> IndependentDrafter:
    """A copy of all of a target's layers between its embedding and its head, in float32.

    Raises:
        ConfigError, FitError: a target that computes something else than ours.
    """
    check_copied_exactly(target.model.config)
    config = config_for_target(target.model.config, draft_vocab_size=len(target.head))
    model = IndependentDrafter(IndependentConfig.like(config, layers=len(target.layers)))
    for ours, theirs in zip(model.device_layers, target.layers, strict=True):
        if unknown := sorted(theirs.state_dict().keys() - ours.state_dict().keys()):
            raise FitError(f"a layer of {target.folder.name} has {unknown[0]}, which a copy could not compute with")
    model.bind_target(target.embedding, target.head)
    model.initialise(target)
    model.eval()
    error = deviation(target, _TOKENS, lambda text, start: _computed(model, text, start))
    if error > _TOLERANCE[target.model.dtype]:
        raise FitError(f"a copy of {target.folder.name} would compute something else: its logits differ by {error:.2g}")
    return model


def _computed(model: IndependentDrafter, text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    """Normed last hidden states and logits of tokens, the first of which is at the position ``start``."""
    angles = model.angles(torch.arange(start, start + len(text)))
    causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    hidden = model.norm(run_layers(model.device_layers, model.embed(torch.tensor(text)), angles, causal)[0])
    return hidden, model.logits(hidden)
