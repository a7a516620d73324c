"""The kinds of drafters, by the names in ``moa-train --arch`` and ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moa_drafter.architectures.eagle3 import Eagle3Drafter, torch_backend
from moa_drafter.architectures.early_exit import EarlyExitDrafter
from moa_drafter.architectures.independent import IndependentDrafter
from moa_drafter.config import (
    CONFIGS,
    ConfigError,
    DrafterConfig,
    Eagle3Config,
    RivalConfig,
    check_architecture,
    check_copied_exactly,
    config_for_target,
)
from moa_drafter.device_module import TorchBackend
from moa_drafter.drafter import Drafter
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.initialise import initialise_from_target
from moa_runtime.backends.base import Backend


@dataclass(frozen=True)
class Architecture:
    """The parts of one kind of drafter.

    Attributes:
        model: class of its module.
        backend: called with a bound drafter and ``top_k``; returns its backend in PyTorch and float32.
        initialise: called with a bound drafter, its target and samples (tokens ``[T]`` and the states that
            :attr:`Drafter.reads` asks for, of some conversations); starts the drafter from the target's weights.
    """

    model: type[Any]
    backend: Callable[..., Backend]
    initialise: Callable[[Any, Target, Iterable[tuple[Tensor, TargetStates]]], None]


#: By the name in ``moa-train --arch`` and ``config.json``.
ARCHITECTURES: Mapping[str, Architecture] = {
    "moa": Architecture(MoADrafter, TorchBackend, initialise_from_target),
    "eagle3": Architecture(Eagle3Drafter, torch_backend, Eagle3Drafter.initialise),
    "early-exit": Architecture(EarlyExitDrafter, TorchBackend, EarlyExitDrafter.initialise),
    "independent": Architecture(IndependentDrafter, TorchBackend, IndependentDrafter.initialise),
}


def torch_backend_of(drafter: Drafter, *, top_k: int) -> Backend:
    """Return the runtime's backend of a bound drafter, whose weights it shares, for ``top_k`` candidates per query."""
    return ARCHITECTURES[drafter.config.architecture].backend(drafter, top_k=top_k)


def initialise(drafter: Drafter, target: Target, samples: Iterable[tuple[Tensor, TargetStates]]) -> None:
    """Start a bound drafter from the target's weights, see :attr:`Architecture.initialise`."""
    ARCHITECTURES[drafter.config.architecture].initialise(drafter, target, samples)


def new_drafter(
    architecture: str,
    target: Target,
    *,
    draft_vocab_size: int,
    lsa_layers: int = 6,
    target_layers: int = 0,
    trained_target_layers: bool = False,
) -> Drafter:
    """Make an unbound drafter with random weights for ``target`` that drafts the first tokens of the vocabulary. Raises
    ConfigError for an unknown architecture, a number out of range, or a target whose layers cannot be copied.

    Args:
        architecture: one of :data:`ARCHITECTURES`.
        draft_vocab_size: tokens that can be drafted, at most the target's.
        lsa_layers: see :func:`~moa_drafter.config.config_for_target`; of MoA alone.
        target_layers, trained_target_layers: see :class:`~moa_drafter.config.DrafterConfig`; of MoA alone.
    """
    check_architecture(architecture)
    if target_layers and architecture != "moa":
        raise ConfigError(f"target_layers are a part of moa, not of {architecture}", code="wrong_architecture")
    moa = config_for_target(
        target.model.config,
        draft_vocab_size=draft_vocab_size,
        lsa_layers=lsa_layers,
        target_layers=target_layers,
        trained_target_layers=trained_target_layers,
        target_fingerprint=target.fingerprint,
    )
    own: dict[str, Any] = {}
    if architecture == "early-exit":
        check_copied_exactly(target.model.config)
        own["exit_layer"] = max(1, round(moa.target_num_layers / 6))  # EESD exits Llama-2 after about a sixth
    if architecture == "eagle3":
        count = moa.target_num_layers
        read = tuple(min(max(1, layer), count - 1) for layer in Eagle3Config.usual_aux_layers(count))
        # Some targets' states of the first token are a thousand times as large as the others'.
        own = {"rope": {"rope_theta": moa.rope_theta}, "aux_layers": read, "fc_norm": True}
    return drafter_of(moa if architecture == "moa" else CONFIGS[architecture].like(moa, **own))  # type: ignore[union-attr]


def drafter_of(config: DrafterConfig | RivalConfig) -> Drafter:
    """Make the drafter of a configuration, with random weights."""
    drafter: Drafter = ARCHITECTURES[config.architecture].model(config)
    return drafter
