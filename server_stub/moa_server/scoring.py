"""How likely the target finds a text that somebody else wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moa_runtime.session.tree import chain
from moa_server.kv_cache import KeyValueCache
from moa_server.transformers_engine import Float32, TransformersEngine
from moa_server.tree_mask import tree_mask

#: Most tokens in one forward; bounds the memory of the logits, ``CHUNK * vocab_size`` numbers.
CHUNK = 128


def log_probabilities(engine: TransformersEngine, prefix: Sequence[int], continuation: Sequence[int]) -> Float32:
    """The target's log-probability of each token of ``continuation``, given all tokens before it.

    Args:
        prefix: at least one token; with the continuation at most ``engine.max_context``.

    Returns:
        natural logarithms, float32 ``[len(continuation)]``.

    Raises:
        ValueError: an empty prefix, or more tokens than the context holds.
    """
    tokens = [*prefix, *continuation]
    if not prefix or len(tokens) > engine.max_context:
        raise ValueError(
            f"a text of {len(prefix)} and {len(continuation)} tokens cannot be scored: the prefix needs at least one, "
            f"and the context holds {engine.max_context}"
        )
    scores = np.empty(len(continuation), np.float32)
    if not continuation:
        return scores
    cache = KeyValueCache(engine.target.model.config.num_hidden_layers)
    # The last token predicts nothing that is asked for; the last of the prefix predicts the first that is.
    for start in range(0, len(tokens) - 1, CHUNK):
        stop = min(start + CHUNK, len(tokens) - 1)
        mask = tree_mask(start, chain(stop - start))
        hidden = engine.forward(tokens[start:stop], torch.arange(start, stop), mask, cache)
        first = max(start, len(prefix) - 1)
        if first < stop:
            scores[first + 1 - len(prefix) : stop + 1 - len(prefix)] = _chosen(
                engine.logits(hidden[first - start :]), tokens[first + 1 : stop + 1]
            )
    return scores


def _chosen(logits: Float32, tokens: Sequence[int]) -> Float32:
    """Log-softmax of ``logits [n, vocab_size]`` at one token of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    normaliser = np.log(np.exp(shifted).sum(axis=1))
    chosen: Float32 = shifted[np.arange(len(tokens)), tokens] - normaliser
    return chosen
