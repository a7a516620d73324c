"""Drafters that look at the tokens alone: a stack of decoder layers, with nothing sent by the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moa_drafter.drafter import Drafter
from moa_drafter.llama import DecoderLayer, KeysValues, RMSNorm, joined
from moa_drafter.rivals.config import TokenConfig
from moa_drafter.states import Reads

if TYPE_CHECKING:
    from moa_drafter.rivals.token_backend import TokenBackend


class TokenDrafter(Drafter):
    """Base of the drafters without memory rows. What they predict depends on no verdict, only on the tokens."""

    config: TokenConfig
    norm: RMSNorm

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config.vocab_size, config.draft_vocab_size, config.decoder.hidden_size)
        self.config = config

    @property
    def row_reads(self) -> Reads:
        """Nothing: no rows travel."""
        return Reads()

    @property
    def device_layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers that a drafting step runs, in order."""
        raise NotImplementedError

    def backend(self, *, top_k: int) -> TokenBackend:
        """See :meth:`Drafter.backend`."""
        from moa_drafter.rivals.token_backend import TokenBackend

        return TokenBackend(self, top_k=top_k)


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    queries: Tensor,
    past: Sequence[KeysValues] = (),
) -> tuple[Tensor, list[KeysValues]]:
    """Run decoder layers over new tokens, the last layer only where its result is wanted.

    Args:
        x: ``[T, hidden]``; ``angles`` are those of their positions.
        mask: boolean ``[T, S + T]``, true where a token may look (earlier tokens first).
        queries: indices ``[Q]`` into the new tokens.
        past: keys and values of ``S`` earlier tokens for each layer, ``[S, kv_heads, head_dim]``; none when empty.

    Returns:
        hidden states ``[Q, hidden]``, and each layer's keys and values of the new tokens.
    """
    new = []
    for at, layer in enumerate(layers):
        new.append(layer.keys_values(x, angles))
        keys, values = joined(*past[at : at + 1], new[at])
        if at == len(layers) - 1:
            x, angles, mask = x[queries], (angles[0][queries], angles[1][queries]), mask[queries]
        x = layer(x, keys, values, angles, mask)
    return x, new
