"""An EAGLE head: one decoder layer that continues the target's last hidden states (arXiv 2401.15077, 2406.16858).

From token ``x_i`` and the *feature* of the token before, the target's last hidden state ``f_{i-1}``, it estimates
``f_i``, from which the target's head reads the next token. For tokens that the target has not processed, its own
estimate replaces the feature.

It differs from the papers in three points: its loss is the forward KL divergence alone, as for the other drafters
(the papers' is close to ``moa-train --loss feature``); it is unrolled in training as it drafts, as in EAGLE-3 (arXiv
2503.01840, section 3.1), instead of adding noise to features; and the layer has the target's norms, the final one
included, so that it can start from its weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from moa_drafter.architectures.unrolled import unroll
from moa_drafter.config import EagleConfig, Reads
from moa_drafter.drafter import Drafter
from moa_drafter.llama import DecoderLayer, RMSNorm
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.initialise import fit_linear
from moa_drafter.training.target_parts import start_layer, start_norm
from moa_runtime.backends.base import Backend, Float32, StepInputs, StepResult
from moa_runtime.backends.eagle3 import parents_of

if TYPE_CHECKING:
    from moa_drafter.training.batch import Batch


class EagleDrafter(Drafter):
    """``norm(layer(fc(embedding, feature)))``."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        hidden, eps = config.decoder.hidden_size, config.rms_norm_eps
        super().__init__(config.vocab_size, config.draft_vocab_size, hidden)
        self.config = config
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layer = DecoderLayer(config.decoder, eps)
        self.norm = RMSNorm(hidden, eps)

    @property
    def reads(self) -> Reads:
        """The last hidden states."""
        return self.config.row_reads

    def rows(self, states: TargetStates, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Drafter.rows`: the features, cut into halves of :attr:`EagleConfig.row_shape`."""
        first, second = states.last.unflatten(-1, (2, *self.config.row_shape)).unbind(-3)
        return first, second

    def inputs(self, tokens: Tensor, earlier: Tensor) -> Tensor:
        """Compute the layer's inputs ``[T, hidden]`` from tokens ``[T]`` and the features before them."""
        return self.fc(torch.cat((self.embed(tokens), earlier), dim=-1))

    def predict(self, batch: Batch) -> Tensor:
        """See :meth:`Drafter.predict` and :func:`moa_drafter.architectures.unrolled.unroll`."""
        return unroll(
            batch,
            batch.states.last,
            self.angles(batch.positions),
            inputs=lambda tokens, earlier: (self.inputs(tokens, earlier),),
            keys_values=lambda x, angles: self.layer.keys_values(*x, angles),
            estimates=lambda x, own, angles, mask: self.norm(self.layer(*x, *own, angles, mask)),
        )

    @torch.no_grad()
    def initialise(self, target: Target, samples: Iterable[tuple[Tensor, TargetStates]]) -> None:
        """Start as the best linear estimate of the next feature from token and feature, with the target's last layer.

        The layer adds nothing at first: the output projections of its two halves are zero.
        """
        start_layer(self.layer, target.layers[-1])
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()
        start_norm(self.norm, target.model.model)
        inputs, outputs = [], []
        for tokens, states in samples:
            known = self.embed(tokens[1:].to(self.embedding.device)), states.last[:-1]
            inputs.append(torch.cat([part.to(self.embedding) for part in known], dim=1))
            outputs.append(states.last[1:].to(self.norm.weight) / self.norm.weight)
        fit_linear(self.fc, torch.cat(inputs), torch.cat(outputs), ridge=1e-2)


class EagleBackend(Backend):
    """The runtime's backend contract for an EAGLE head: PyTorch, float32.

    A memory row is a token's feature, in two halves. A cache entry is the layer's key and value of a token, each
    followed by half of the estimated feature, which the next token needs if this one has no row; otherwise the
    estimate may be zero.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    needs_a_row = False
    entries_from_rows = True

    def __init__(self, drafter: EagleDrafter, *, top_k: int) -> None:
        self._drafter, self._top_k = drafter, min(top_k, drafter.config.draft_vocab_size)
        decoder = drafter.config.decoder
        self._heads = (decoder.num_kv_heads, decoder.head_dim)
        self._sizes = (decoder.num_kv_heads * decoder.head_dim, decoder.hidden_size // 2)

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return 1, sum(self._sizes)

    @property
    def row_shape(self) -> tuple[int, int]:
        return self._drafter.config.row_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        drafter, held, count = self._drafter, len(inputs.self_keys), len(tokens)
        keys, first = self._with_room(inputs.self_keys, count)
        values, second = self._with_room(inputs.self_values, count)
        features = torch.cat((first, second), dim=1)  # [S + T, hidden], estimates
        halves = (torch.from_numpy(half).flatten(1) for half in (inputs.memory_keys, inputs.memory_values))
        rows = torch.cat(tuple(halves), dim=1)
        before = torch.nn.functional.pad(rows, (0, 0, 1, 0))  # by position; zeros before the first token
        ids, places, mask = (torch.from_numpy(part) for part in (tokens, positions, inputs.self_mask))
        given, parents = positions < len(before), parents_of(inputs.self_mask, held)
        # Estimates are needed of queries and of tokens without a row.
        wanted = positions >= len(rows)
        wanted[queries] = True
        known = np.arange(held + count) < held
        while not known.all():
            # All tokens whose previous feature is known; in a chain without rows that is one at a time.
            ready = np.flatnonzero(~known[held:] & (given | known[parents]))
            new, from_row = torch.from_numpy(ready), torch.from_numpy(given[ready])
            earlier = features[torch.from_numpy(parents[ready])]
            earlier[from_row] = before[places[new][from_row]]
            x, angles = drafter.inputs(ids[new], earlier), drafter.angles(places[new])
            keys[held + new], values[held + new] = drafter.layer.keys_values(x, angles)
            asked = np.flatnonzero(wanted[ready])
            if len(asked):
                at = torch.from_numpy(asked)
                angles = angles[0][at], angles[1][at]
                hidden = drafter.layer(x[at], keys, values, angles, mask[new[at]])
                features[held + new[at]] = drafter.norm(hidden)
            known[held + ready] = True
        top, logprobs = drafter.candidates(features[held + torch.from_numpy(queries)], self._top_k)
        first, second = features[held:].chunk(2, dim=1)
        entries = (torch.cat((part[held:].flatten(1), half), dim=1) for part, half in ((keys, first), (values, second)))
        return StepResult(top.numpy(), logprobs.numpy(), *(entry.unsqueeze(1).numpy() for entry in entries))

    def _with_room(self, cached: Float32, count: int) -> tuple[Tensor, Tensor]:
        """Split cache entries ``[S, 1, size]`` into keys or values ``[S + count, kv_heads, head_dim]`` and halves of
        features ``[S + count, hidden / 2]``, the last ``count`` of them zero."""
        whole = torch.nn.functional.pad(torch.from_numpy(cached)[:, 0], (0, 0, 0, count))
        own, half = whole.split(self._sizes, dim=1)
        return own.unflatten(1, self._heads).contiguous(), half
