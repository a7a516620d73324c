"""Choices of a user or host: the drafter, the length of drafts, the side that drafts, offline text, threads, limits.

Imports nothing heavy, so that ``--help`` is fast.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from moa_runtime.errors import MoaError

#: The side that drafts. ``auto`` is the one that is expected to bring more tokens a second, see
#: :class:`moa_runtime.drafting.drafter_selection.DrafterSelection`.
Drafting = Literal["auto", "device", "server"]
DRAFTINGS: tuple[Drafting, ...] = get_args(Drafting)

#: What writes during an outage. ``writer``: the bundle's whole model, or the drafter if it has none. ``off``: nothing,
#: the answer waits.
Offline = Literal["writer", "drafter", "off"]
OFFLINES: tuple[Offline, ...] = get_args(Offline)

#: What happens if a conversation outgrows the target's context. ``error``: the question is refused. ``trim``: once it
#: leaves less than an eighth free, the target reads the system message and as many of the newest turns as take half.
Overflow = Literal["error", "trim"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

#: Kinds of adaptive drafts: ``auto`` takes the shape that pays (:mod:`moa_runtime.drafting.cost_model`), the others are
#: Thompson sampling as in EESD (:mod:`moa_runtime.drafting.draft_controllers`).
Adaptive = Literal["auto", "thompson", "thompson-calibrated"]
ADAPTIVE: tuple[Adaptive, ...] = get_args(Adaptive)
#: Tokens of each draft, a chain; or the kind of adaptive drafts.
DraftLength = int | Adaptive

DrafterName = Literal["moa", "sssd", "early-exit", "independent"]


def draft_length_of(text: str) -> DraftLength:
    """Parse a draft length of a command line; raise ArgumentTypeError if it is none."""
    for word in ADAPTIVE:
        if text == word:
            return word
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number or {', '.join(ADAPTIVE)}, not {text!r}") from None


@dataclass(frozen=True)
class DrafterKind:
    """Facts of a drafter that are known before it is loaded.

    Attributes:
        help: what it is, and when to choose it.
        architecture: of its graph, as a bundle's manifest names it; None for a drafter without a graph.
    """

    help: str
    architecture: str | None

    @property
    def has_graph(self) -> bool:
        """Whether it computes a bundle's graph."""
        return self.architecture is not None

    @property
    def reads_rows(self) -> bool:
        """Whether it reads memory rows; if not, the server sends none."""
        return self.architecture == "moa"


#: By name, the default first. :func:`moa_runtime.drafters.factory.drafter_for` makes them;
#: :mod:`moa_drafter.pretrained` knows for which there are weights.
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
#: Architectures of bundles without a graph: the device copies what was said before, or drafts nothing.
WITHOUT_GRAPH = ("sssd", "none")


def drafter_option(name: DrafterName | None) -> tuple[str, ...]:
    """Return the arguments that select a drafter in ``moa-export`` and ``moa-serve``: none for the default one, and for
    those without a graph, which use the default one's bundle."""
    return () if name is None or name == DEFAULT_DRAFTER or not DRAFTERS[name].has_graph else ("--drafter", name)


class OtherDrafterError(MoaError):
    """The bundle in ``folder`` holds another drafter, ``found``, than the one that was asked for."""

    def __init__(self, folder: Path, found: str, wanted: str) -> None:
        super().__init__(
            f"the bundle {folder} drafts with {found}, not with {wanted}: name no drafter, or a bundle that "
            f"`moa-export --drafter {wanted} --out DIR` made",
            code="other_drafter",
        )


#: Threads that a program accepts: more than any processor has, and few enough to start and stop.
MOST_THREADS = 1024
#: The largest value of other numbers of a command line; a Welcome tells some of them in 32 bits.
LARGEST_OPTION = (1 << 31) - 1


def available_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_many_threads(threads: int | None) -> str | None:
    """Return a warning if ``threads`` (None: not chosen) are more than the processors of this process; else None."""
    available = available_cpus()
    if threads is None or threads <= available:
        return None
    processors = "1 processor" if available == 1 else f"{available} processors"
    return (
        f"{threads} threads on the {processors} that this process may use wait for each other: "
        f"--threads {available} is quicker"
    )


@dataclass(frozen=True)
class LoopSettings:
    """Limits of the drafting loop.

    Attributes:
        offline_limit: maximal number of tokens written without the target.
        late_after_s: seconds after which a draft's verdict is late and the device continues alone.
        prefill_late_after_s: the same for a prompt's verdict.
        outage_after_s: seconds after which a link that is down is an outage: text since the last frame becomes offline
            text.
        drafting: the side that drafts while the link is up, see
            :class:`~moa_runtime.drafting.drafter_selection.DrafterSelection`.
        offline: what writes during an outage.

    Raises:
        MoaError: if a number is negative, or ``drafting`` or ``offline`` is unknown.
    """

    offline_limit: int = 256
    late_after_s: float = 2.0
    prefill_late_after_s: float = 6.0
    outage_after_s: float = 1.0
    drafting: Drafting = "auto"
    offline: Offline = "writer"

    def __post_init__(self) -> None:
        words = {"drafting": DRAFTINGS, "offline": OFFLINES}
        for name, known in words.items():
            if getattr(self, name) not in known:
                text = f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                raise MoaError(text, code="bad_option")
        for name, value in vars(self).items():
            if name not in words and not value >= 0:
                raise MoaError(f"{name} must be 0 or more, not {value}", code="out_of_range")


@dataclass(frozen=True)
class Conditions:
    """Conditions of the device that the host reports, see "Conditions" in the client's documentation.

    Attributes:
        background: the app is not visible: nothing is drafted or requested until it is.
        low_power: the model takes no steps: drafts are copies only, and nothing is written offline.
        metered: bytes cost money: the server sends no memory rows, so drafts are copies only.
    """

    background: bool = False
    low_power: bool = False
    metered: bool = False
