"""The contract between the verifier and whatever runs the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moa_runtime.session.handshake import Fingerprints
from moa_runtime.session.server import Sampling

Float32 = NDArray[np.float32]


class TargetSequence(Protocol):
    """One conversation's state in the engine: the target's key-value cache and the memory rows.

    Every call names the whole prefix, so the cache synchronises itself: what no longer matches is
    dropped, what is missing is computed, also all of it after :meth:`close` freed the memory.
    """

    def verify(
        self, prefix: Sequence[int], draft: Sequence[int], parents: Sequence[int], sampling: Sampling
    ) -> list[int]:
        """Run the target over a draft tree, all of it in one forward.

        Args:
            prefix: the committed conversation, at least one token; what the cache lacks is prefilled.
            draft, parents: a tree as in :mod:`moa_runtime.session.tree`; may be empty.

        Returns:
            the target's choice after the prefix and after each draft token, ``len(draft) + 1``.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Of the draft last verified keep the tokens with these indices, in this order, forget the rest."""

    def rows(self, positions: range) -> tuple[Float32, Float32] | None:
        """Memory rows ``(keys, values)``, each ``[len(positions), heads, size]``; None where the drafter takes none.

        ``positions`` must lie within the tokens processed and kept.
        """

    def close(self) -> None:
        """Free the cache; a later :meth:`verify` fills it again."""


class Engine(Protocol):
    """A loaded target with the drafter's server half."""

    @property
    def fingerprints(self) -> Fingerprints: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> Sequence[int]: ...

    @property
    def max_context(self) -> int: ...

    @property
    def forwards(self) -> int:
        """Forward passes of the target so far, all sequences together."""

    def open(self) -> TargetSequence:
        """A new, empty sequence."""
