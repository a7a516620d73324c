"""Drafters that draft from their checkpoint, in PyTorch and float32, in the process that verifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moa_bench.inprocess import Device
from moa_runtime.bundle import TOKENIZER_FILE
from moa_runtime.drafters.mixture import NgramMixture
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from moa_drafter.drafter import Drafter
    from moa_drafter.target import Target
    from moa_server.transformers_engine import TransformersEngine


def checkpoint_pair(folder: Path, target: Target, *, ngrams: bool = True) -> tuple[Device, TransformersEngine]:
    """Both ends for the drafter in ``folder``, of any architecture.

    Args:
        ngrams: see :func:`drafting`.

    Raises:
        MoaError: what cannot be read, or does not fit the target.
    """
    from moa_drafter.checkpoint import drafter_fingerprint, load_bound
    from moa_drafter.layout import input_major, lay_out_for_few_rows
    from moa_server.transformers_engine import TransformersEngine

    drafter = load_bound(folder, target)
    if target.device.type == "cpu":
        lay_out_for_few_rows(drafter)
        if len(drafter.head) < len(target.head):  # a copy of some rows; all of them are the target's own memory
            drafter.head = input_major(drafter.head)
    engine = TransformersEngine(target, drafter, drafter_fingerprint(folder))
    new_drafter = drafting(drafter, max_context=engine.max_context, stop_tokens=engine.stop_tokens, ngrams=ngrams)
    # As a bundle for the target would have it.
    tokenizer = ChatTokenizer(
        target.folder / TOKENIZER_FILE, target.chat_template, target.special_tokens, target.stop_tokens
    )
    return Device(engine.fingerprints, tokenizer, new_drafter, target.stop_tokens), engine


def drafting(
    drafter: Drafter, *, max_context: int, stop_tokens: tuple[int, ...] = (), ngrams: bool = True
) -> Callable[[], MoaDrafter]:
    """Makes what drafts with a bound drafter; weights are shared, caches are not.

    Args:
        ngrams: mix with what the conversation says already, see :class:`moa_runtime.drafters.mixture.NgramMixture`.
    """
    from moa_export.recipe import Recipe

    backend = drafter.backend(top_k=Recipe().top_k)  # candidates for each node of a tree, as in a bundle
    return lambda: MoaDrafter(
        backend,
        max_context=max_context,
        stop_tokens=stop_tokens,
        mixture=NgramMixture(stop_tokens) if ngrams else None,
    )
