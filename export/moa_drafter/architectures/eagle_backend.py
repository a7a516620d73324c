"""An EAGLE head behind the runtime's backend contract."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moa_drafter.architectures.eagle import EagleDrafter
from moa_runtime.backends.base import Backend, Bool, Float32, Int64, StepInputs, StepResult


class EagleBackend(Backend):
    """In PyTorch, float32.

    A memory row is a token's feature, in two halves. A cache entry is the layer's key and value of a token, and
    behind them, half in the keys and half in the values, the feature that was estimated for it: the next token needs
    that where the target has not been. Tokens that have a row need none, so theirs may be zero.

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
        before = torch.nn.functional.pad(rows, (0, 0, 1, 0))  # by position; before the first token there is nothing
        ids, places, mask = (torch.from_numpy(part) for part in (tokens, positions, inputs.self_mask))
        given, parents = positions < len(before), _parents(inputs.self_mask, held)
        # Estimates are needed of tokens without a row, for those after them, and of queries.
        wanted = positions >= len(rows)
        wanted[queries] = True
        known = np.arange(held + count) < held
        while not known.all():
            # All tokens before which the feature is known; of a chain without rows that is one at a time.
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
        """Cache entries ``[S, 1, size]`` -> keys or values ``[S + count, kv_heads, head_dim]`` and halves of features
        ``[S + count, hidden / 2]``, the last ``count`` of them zero."""
        whole = torch.nn.functional.pad(torch.from_numpy(cached)[:, 0], (0, 0, 0, count))
        own, half = whole.split(self._sizes, dim=1)
        return own.unflatten(1, self._heads).contiguous(), half


def _parents(mask: Bool, held: int) -> Int64:
    """For each new token the number of the token before it, ``held`` cached ones first; for the very first any.

    Args:
        mask: ``[T, S + T]``, true for a token's ancestors and itself. The nearest ancestor is the last of them.
    """
    ancestors = mask.copy()
    ancestors[np.arange(len(mask)), held + np.arange(len(mask))] = False
    return mask.shape[1] - 1 - ancestors[:, ::-1].argmax(axis=1)
