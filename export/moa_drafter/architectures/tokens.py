"""Drafters that look at the tokens alone: a stack of decoder layers, with nothing sent by the server."""

from __future__ import annotations

from collections.abc import Sequence

from moa_drafter.architectures.config import TokenConfig
from moa_drafter.drafter import Drafter
from moa_drafter.llama import DecoderLayer, RMSNorm
from moa_drafter.target_features import Reads


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
