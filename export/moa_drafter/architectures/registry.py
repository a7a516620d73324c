"""The kinds of drafters, by the names in ``moa-train --arch`` and ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moa_drafter.architectures.eagle import EagleBackend, EagleConfig, EagleDrafter
from moa_drafter.architectures.early_exit import EarlyExitConfig, EarlyExitDrafter
from moa_drafter.architectures.independent import IndependentConfig, IndependentDrafter
from moa_drafter.config import ConfigError, DrafterConfig, check_copied_exactly, config_for_target
from moa_drafter.device_module import TokenTorchBackend, TorchBackend
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
        config, model: classes of its configuration and its module.
        backend: called with a bound drafter and ``top_k``; returns its backend in PyTorch and float32.
        initialise: called with a bound drafter, its target and samples (tokens ``[T]`` and the states that
            :attr:`Drafter.reads` asks for, of some conversations); starts the drafter from the target's weights.
    """

    config: type[Any]
    model: type[Any]
    backend: Callable[..., Backend]
    initialise: Callable[[Any, Target, Iterable[tuple[Tensor, TargetStates]]], None]


#: By the name in ``moa-train --arch`` and ``config.json``.
ARCHITECTURES: Mapping[str, Architecture] = {
    "moa": Architecture(DrafterConfig, MoADrafter, TorchBackend, initialise_from_target),
    "eagle": Architecture(EagleConfig, EagleDrafter, EagleBackend, EagleDrafter.initialise),
    "early-exit": Architecture(EarlyExitConfig, EarlyExitDrafter, TokenTorchBackend, EarlyExitDrafter.initialise),
    "independent": Architecture(
        IndependentConfig, IndependentDrafter, TokenTorchBackend, IndependentDrafter.initialise
    ),
}


def torch_backend_of(drafter: Drafter, *, top_k: int) -> Backend:
    """Return the runtime's backend of a bound drafter, in PyTorch and float32; it shares the drafter's weights.

    Args:
        top_k: candidates per query, at most the draft vocabulary.
    """
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
    """A drafter with random weights for ``target``, not bound to it; it can draft the first tokens of the vocabulary.

    Args:
        architecture: one of :data:`ARCHITECTURES`.
        draft_vocab_size: tokens that can be drafted, at most the target's.
        lsa_layers: see :func:`~moa_drafter.config.config_for_target`; of MoA alone.
        target_layers, trained_target_layers: see :class:`~moa_drafter.config.DrafterConfig`; of MoA alone.

    Raises:
        ValueError: an unknown architecture.
        ConfigError: a number out of range, or a target whose layers cannot be copied into the drafter.
    """
    if target_layers and architecture != "moa":
        raise ConfigError(f"target_layers are a part of moa, not of {architecture}")
    moa = config_for_target(
        target.model.config,
        draft_vocab_size=draft_vocab_size,
        lsa_layers=lsa_layers,
        target_layers=target_layers,
        trained_target_layers=trained_target_layers,
        target_fingerprint=target.fingerprint,
    )
    if architecture == "moa":
        return MoADrafter(moa)
    if architecture == "eagle":
        return EagleDrafter(EagleConfig.like(moa))
    if architecture == "early-exit":
        check_copied_exactly(target.model.config)
        # EESD leaves Llama-2 after about a sixth of its layers.
        return EarlyExitDrafter(EarlyExitConfig.like(moa, exit_layer=max(1, round(moa.target_num_layers / 6))))
    if architecture == "independent":
        return IndependentDrafter(IndependentConfig.like(moa))
    raise ValueError(f"unknown architecture {architecture!r}: expected one of {', '.join(ARCHITECTURES)}")


def drafter_of(text: str) -> Drafter:
    """The drafter that a ``config.json`` describes, with random weights.

    Raises:
        ConfigError: no configuration of ours.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("not a drafter configuration: expected one JSON object")
    architecture = raw.get("architecture", "moa")
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {architecture!r}: expected one of {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[architecture]
    drafter: Drafter = kind.model(kind.config.from_mapping(raw))
    return drafter
