"""What drafts, as a user asks for it. Light, so that a command line can say it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DrafterName = Literal["moa", "sssd"]


@dataclass(frozen=True)
class DrafterKind:
    """What is to be known of a drafter before there is one.

    Attributes:
        help: what it is, and when it is right.
        has_graph: whether it computes a bundle's graph.
        reads_rows: whether it has a use for memory rows, which are not sent otherwise.
    """

    help: str
    has_graph: bool
    reads_rows: bool


#: By name, the default first. :func:`moa_runtime.drafters.for_bundle.drafter_for` makes them.
DRAFTERS: Mapping[DrafterName, DrafterKind] = {
    "moa": DrafterKind(
        "the bundle's model, mixed with what was said before: right for most", has_graph=True, reads_rows=True
    ),
    "sssd": DrafterKind(
        "what was said before alone, without a model: right on a device that is slow, or has to save power",
        has_graph=False,
        reads_rows=False,
    ),
}
