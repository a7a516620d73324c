"""What drafts, as a user asks for it. Light, so that a command line can say it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moa_runtime.errors import MoaError

DrafterName = Literal["moa", "sssd", "early-exit", "independent"]


@dataclass(frozen=True)
class DrafterKind:
    """What is to be known of a drafter before there is one.

    Attributes:
        help: what it is, and when it is right.
        architecture: of the graph that it computes, as a bundle's manifest says it; None for a drafter without one.
    """

    help: str
    architecture: str | None

    @property
    def has_graph(self) -> bool:
        """Whether it computes a bundle's graph."""
        return self.architecture is not None

    @property
    def reads_rows(self) -> bool:
        """Whether it has a use for memory rows, which are not sent otherwise."""
        return self.architecture == "moa"


#: By name, the default first. :func:`moa_runtime.drafters.factory.drafter_for` makes them. Which of them there are
#: weights of, so that a bundle can be made, is known where checkpoints are: :mod:`moa_drafter.pretrained`.
DRAFTERS: Mapping[DrafterName, DrafterKind] = {
    "moa": DrafterKind(
        "Mixture of Attentions, which reads the verifier's memory rows: right for most",
        architecture="moa",
    ),
    "sssd": DrafterKind(
        "what was said before alone, without a model: right on a device that is slow, or has to save power",
        architecture=None,
    ),
    "early-exit": DrafterKind(
        "the target's first layers and one of its own: right with a verifier that has another drafter or none, on a "
        "device that is fast enough for these layers",
        architecture="early-exit",
    ),
    "independent": DrafterKind(
        "a language model of two layers: right with such a verifier on a slower device, or as a plain drafter to "
        "compare with",
        architecture="independent",
    ),
}
DEFAULT_DRAFTER: DrafterName = next(iter(DRAFTERS))


def drafter_option(name: DrafterName | None) -> tuple[str, ...]:
    """What ``moa-export`` and ``moa-serve`` are to be told for a drafter; nothing for the default one, and for those
    without a graph, which go with the default one's bundle."""
    return () if name is None or name == DEFAULT_DRAFTER or not DRAFTERS[name].has_graph else ("--drafter", name)


class OtherDrafterError(MoaError):
    """A bundle of another drafter than the one that was asked for.

    Args:
        found: what the bundle in ``folder`` drafts with.
    """

    def __init__(self, folder: Path, found: str, wanted: str) -> None:
        super().__init__(
            f"the bundle {folder} drafts with {found}, not with {wanted}: name no drafter, or a bundle that "
            f"`moa-export --drafter {wanted} --out DIR` made"
        )
