"""All of a model as a drafter that looks at tokens alone: what a device writes with while it has no verifier."""

from __future__ import annotations

import torch

from moa_drafter.architectures.independent import IndependentConfig, IndependentDrafter
from moa_drafter.compatibility import FitError
from moa_drafter.config import check_copied_exactly, config_for_target
from moa_drafter.target import Target


@torch.no_grad()
def whole_model(target: Target) -> IndependentDrafter:
    """A copy of all of a target's layers between its embedding and its head, in float32.

    Raises:
        ConfigError, FitError: a target whose layers compute something else than ours.
    """
    check_copied_exactly(target.model.config)
    config = config_for_target(target.model.config, draft_vocab_size=len(target.head))
    model = IndependentDrafter(IndependentConfig.like(config, layers=len(target.layers)))
    for ours, theirs in zip(model.device_layers, target.layers, strict=True):
        if unknown := sorted(theirs.state_dict().keys() - ours.state_dict().keys()):
            raise FitError(f"a layer of {target.folder.name} has {unknown[0]}, which a copy could not compute with")
    model.bind_target(target.embedding, target.head)
    model.initialise(target)
    return model.eval()
