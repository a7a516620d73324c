"""Device and verifier of the benchmarks that run both in this process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moa_bench.questions import Question
from moa_drafter.pretrained import checkpoint_of
from moa_runtime.backends.load import load_backend, load_writer
from moa_runtime.bundle import Bundle, Fingerprints
from moa_runtime.datastore.reader import Datastore
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.factory import drafter_for, writer_for
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from moa_drafter.progress import Progress
    from moa_server.engine.transformers import TransformersEngine


@dataclass(frozen=True)
class Device:
    """What a device has: a bundle's fingerprints and tokenizer, and a drafter for each conversation; also what writes
    without a verifier, if the bundle has it.

    Attributes:
        reads_rows: whether its drafter has a use for memory rows.
    """

    fingerprints: Fingerprints
    tokenizer: ChatTokenizer
    new_drafter: Callable[[], Drafter]
    stop_tokens: tuple[int, ...]
    new_writer: Callable[[], MoaDrafter] | None = None
    reads_rows: bool = True


def device_of(
    bundle: Bundle, backend_name: str | None = None, *, ngrams: bool = True, datastore: Datastore | None = None
) -> Device:
    """What drafts with ``bundle`` on the backend of that name, or on the first it has a graph for.

    Args:
        ngrams, datastore: see :func:`moa_runtime.drafters.factory.drafter_for`.

    Raises:
        MoaError: the bundle's graph or tokenizer cannot be loaded.
    """
    backend, manifest, writer = load_backend(bundle, backend_name), bundle.manifest, load_writer(bundle)
    return Device(
        manifest.fingerprints,
        ChatTokenizer.from_bundle(bundle),
        # The graph is shared; each conversation has caches of its own.
        lambda: drafter_for(manifest, backend, ngrams=ngrams, datastore=datastore),
        manifest.stop_tokens,
        None if writer is None else lambda: writer_for(manifest, writer),
    )


def engine_of(args: argparse.Namespace) -> TransformersEngine:
    """The engine that ``--model`` and ``--drafter`` name.

    Raises:
        MoaError: what cannot be found, read, or does not fit together.
    """
    # Imported late: this brings torch, and --help should answer at once.
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_server.engine.transformers import TransformersEngine

    return TransformersEngine.load(args.model or DEFAULT_TARGET, checkpoint_of(args.drafter))


def with_progress(questions: list[Question], benchmark: str) -> Progress:
    """The questions, with their progress on stderr from this moment on."""
    from moa_drafter.progress import Progress

    return Progress(questions, desc=benchmark, unit="question")
