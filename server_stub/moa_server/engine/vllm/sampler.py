"""Sampler for vLLM: replaces vLLM's random generator with ours, a function of seed and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from moa_server.engine.sampling import Chooser


class TargetSampler:
    """Replaces both samplers of vLLM's model runner.

    Attributes:
        choosers: of each request of the step, by name; None if no token is to be chosen.
    """

    def __init__(self, runner: Any) -> None:
        self.choosers: Mapping[str, Chooser | None] = {}
        self._batch = runner.input_batch
        runner.sampler, runner.rejection_sampler = self._without_drafts, self._with_drafts

    def _without_drafts(self, logits: Tensor, sampling_metadata: object) -> SamplerOutput:
        """Return the next token of each request of the batch; logits ``[requests, vocab_size]``."""
        tokens = [[self._choice(row, logits[row], ())] for row in range(len(logits))]
        return _output(tokens, logits.device)

    def _with_drafts(
        self, metadata: SpecDecodeMetadata, draft_probs: object, logits: Tensor, sampling_metadata: object
    ) -> SamplerOutput:
        """Return the accepted drafted tokens of each request, and the target's choice after them; logits ``[drafted
        tokens + requests, vocab_size]``."""
        drafted, rows = metadata.draft_token_ids.tolist(), metadata.target_logits_indices.tolist()
        last, first, tokens = metadata.bonus_logits_indices.tolist(), 0, []
        for number, count in enumerate(metadata.num_draft_tokens):
            own = slice(first, first + count)
            tokens.append(self._verdict(number, drafted[own], logits[[*rows[own], last[number]]]))
            first += count
        return _output(tokens, logits.device)

    def _verdict(self, number: int, draft: list[int], logits: Tensor) -> list[int]:
        """Return what the target chooses along a draft; logits ``[drafted + 1, vocab_size]``."""
        chosen: list[int] = []
        for index, row in enumerate(logits):
            chosen.append(self._choice(number, row, draft[:index]))
            if index == len(draft) or chosen[-1] != draft[index]:
                break
        return chosen

    def _choice(self, number: int, logits: Tensor, path: Sequence[int]) -> int:
        """Choose the token after the tokens of request ``number`` and those of ``path``; 0 if nothing is chosen."""
        chooser = self.choosers.get(self._batch.req_ids[number])
        return 0 if chooser is None else chooser.choose(logits.float().cpu().numpy(), path)


def _output(tokens: list[list[int]], device: torch.device) -> SamplerOutput:
    longest = max(map(len, tokens))
    padded = [each + [-1] * (longest - len(each)) for each in tokens]  # vLLM's padding after the last token of a row
    return SamplerOutput(torch.tensor(padded, dtype=torch.int32, device=device), None)
