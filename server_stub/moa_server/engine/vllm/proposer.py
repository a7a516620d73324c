"""vLLM's own drafter: it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NoProposals:
    """Proposes nothing, so that every draft that vLLM verifies is one that the verifier was given.

    vLLM makes one where ``speculative_config`` names the class (method ``custom_class``).
    """

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """An empty draft for each request of the step."""
        return [[] for _ in sampled_token_ids]
