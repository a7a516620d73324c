"""Drafters without a bundle, in the process that verifies: from their checkpoint, in PyTorch and float32, or without a
model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moa_bench.inprocess import Device
from moa_drafter.checkpoint_files import drafter_fingerprint
from moa_drafter.pretrained import checkpoint_of
from moa_runtime.bundle import TOKENIZER_FILE, tokenizer_fingerprint
from moa_runtime.datastore.reader import Datastore
from moa_runtime.drafter_names import DRAFTERS, DrafterName
from moa_runtime.drafters.mixture import NgramMixture
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.sssd import SssdDrafter
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from moa_drafter.drafter import Drafter
    from moa_drafter.target import Target
    from moa_server.engine.transformers import TransformersEngine


def without_model(given: str | Path) -> DrafterName | None:
    """The drafter that has no checkpoint where its name stands in the place of one."""
    return next((name for name, kind in DRAFTERS.items() if not kind.has_graph and name == given), None)


def checkpoint_pair(
    given: str | Path, target: Target, *, ngrams: bool = True, datastore: Path | None = None
) -> tuple[Device, TransformersEngine]:
    """Both ends for a drafter of any architecture, or one :func:`without_model`.

    Args:
        given: see :func:`moa_drafter.pretrained.checkpoint_of`.
        ngrams: see :func:`drafting`.
        datastore: a file of earlier texts.

    Raises:
        MoaError: what cannot be read, or does not fit the target.
    """
    from moa_server.engine.transformers import TransformersEngine

    # As a bundle for the target would have it.
    tokenizer = ChatTokenizer(
        target.folder / TOKENIZER_FILE, target.chat_template, target.special_tokens, target.stop_tokens
    )
    texts = None
    if datastore is not None:
        texts = Datastore.open(datastore, tokenizer_fingerprint(target.folder / TOKENIZER_FILE))
    if without_model(given) == "sssd":
        engine = TransformersEngine(target)
        stops = engine.stop_tokens
        return Device(
            engine.fingerprints,
            tokenizer,
            lambda: SssdDrafter(stops, texts),
            stops,
            reads_rows=DRAFTERS["sssd"].reads_rows,
        ), engine
    from moa_drafter.checkpoint import load_bound
    from moa_drafter.weight_layout import input_major, lay_out_for_few_rows

    folder = checkpoint_of(given)
    drafter = load_bound(folder, target)
    if target.device.type == "cpu":
        lay_out_for_few_rows(drafter)
        if len(drafter.head) < len(target.head):  # a copy of some rows; all of them are the target's own memory
            drafter.head = input_major(drafter.head)
    engine = TransformersEngine(target, drafter, drafter_fingerprint(folder))
    new_drafter = drafting(
        drafter, max_context=engine.max_context, stop_tokens=engine.stop_tokens, ngrams=ngrams, datastore=texts
    )
    return Device(engine.fingerprints, tokenizer, new_drafter, target.stop_tokens), engine


def drafting(
    drafter: Drafter,
    *,
    max_context: int,
    stop_tokens: tuple[int, ...] = (),
    ngrams: bool = True,
    datastore: Datastore | None = None,
) -> Callable[[], MoaDrafter]:
    """Makes what drafts with a bound drafter; weights are shared, caches are not.

    Args:
        ngrams: mix with what the conversation, and a datastore, say already, see
            :class:`moa_runtime.drafters.mixture.NgramMixture`.
    """
    from moa_export.recipe import Recipe

    backend = drafter.backend(top_k=Recipe().top_k)  # candidates for each node of a tree, as in a bundle
    return lambda: MoaDrafter(
        backend,
        max_context=max_context,
        stop_tokens=stop_tokens,
        mixture=NgramMixture(stop_tokens, datastore=datastore) if ngrams else None,
    )
