"""What every answer of the network benchmark is measured with."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.draft_length import DraftLength
from moa_runtime.session.events import Sampling


@dataclass(frozen=True)
class NetworkSettings:
    """The same for every mode, as far as it has a use for it.

    Args:
        draft_length: tokens of each draft, a chain, or as many as pay.
        max_new_tokens: tokens of an answer at most.
        threads: processor threads of the drafter.
        answer_timeout_s: seconds after which an answer, connecting included, is given up.
    """

    draft_length: DraftLength = "auto"
    max_new_tokens: int = 32
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    threads: int = 1
    answer_timeout_s: float = 120.0
