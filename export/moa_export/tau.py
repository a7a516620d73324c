"""Tau of a device half by replay: what quantisation costs in the end.

A greedy chain commits the target's own text whatever was drafted. So where that text is known, a round needs
no target: draft, count how many tokens are the text's, go on behind the next one. This is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moa_export.recordings import Recording
from moa_runtime.backends.base import Backend
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter

DRAFT_LENGTH = 6
_ONE = Budget.chain(1, nodes=1)


@dataclass(frozen=True)
class Tau:
    """Rounds of all conversations, and the tokens they committed (the bonus token included)."""

    rounds: int
    tokens: int

    @property
    def value(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def replay(
    backend: Backend,
    recordings: Sequence[Recording],
    *,
    stop_tokens: Sequence[int] = (),
    draft_length: int = DRAFT_LENGTH,
    on_conversation: Callable[[], None] = lambda: None,
) -> Tau:
    """Hold the recorded conversations again with ``backend`` drafting greedy chains.

    Args:
        stop_tokens: as :class:`~moa_runtime.drafters.moa.MoaDrafter` takes them.
        on_conversation: called after each conversation.
    """
    rounds = tokens = 0
    for recording in recordings:
        drafter = MoaDrafter(backend, max_context=len(recording.tokens) + draft_length, stop_tokens=stop_tokens)
        # The verdict on the prompt brings the first token of the answer.
        base = recording.prompt + 1
        while base < len(recording.tokens):
            held = drafter.rows
            drafter.add_rows(held, recording.keys[held : base - 1], recording.values[held : base - 1])
            stop = min(base + draft_length, len(recording.tokens))
            right = base
            # Token by token, because what comes after a wrong one can commit nothing.
            while right < stop and drafter.propose(recording.tokens[:right], _ONE).tokens[0] == recording.tokens[right]:
                right += 1
            end = min(right + 1, len(recording.tokens))
            rounds, tokens, base = rounds + 1, tokens + end - base, end
        on_conversation()
    return Tau(rounds, tokens)
