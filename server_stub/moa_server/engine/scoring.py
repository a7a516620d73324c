"""How likely the target finds a text that somebody else wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from moa_server.engine.base import Float32
from moa_server.engine.forward import Piece
from moa_server.engine.kv_cache import Room
from moa_server.engine.transformers import TransformersEngine

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
    # The last token predicts nothing that is asked for; the last of the prefix predicts the first that is.
    for start, hidden in _hidden_states(engine, tokens[:-1]):
        first, stop = max(start, len(prefix) - 1), start + len(hidden)
        if first < stop:
            scores[first + 1 - len(prefix) : stop + 1 - len(prefix)] = _chosen(
                engine.target_pass.logits(hidden[first - start :]).cpu().numpy(), tokens[first + 1 : stop + 1]
            )
    return scores


def next_logits(engine: TransformersEngine, text: Sequence[int]) -> Float32:
    """What the target makes of a text: ``[vocab_size]`` behind its last token; at least one token."""
    *_, (_, hidden) = _hidden_states(engine, text)
    logits: Float32 = engine.target_pass.logits(hidden[-1:])[0].float().cpu().numpy()
    return logits


def _hidden_states(engine: TransformersEngine, text: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The target's last hidden states of a text, chunk by chunk: position of the first one, and ``[n, hidden]``."""
    room = Room(engine.target_pass.room_shape, len(text))
    for start in range(0, len(text), CHUNK):
        hidden, count = engine.target_pass.forward([Piece(room, start, text[start : start + CHUNK])])
        engine.forwards += count
        yield start, hidden


def _chosen(logits: Float32, tokens: Sequence[int]) -> Float32:
    """Log-softmax of ``logits [n, vocab_size]`` at one token of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    normaliser = np.log(np.exp(shifted).sum(axis=1))
    chosen: Float32 = shifted[np.arange(len(tokens)), tokens] - normaliser
    return chosen
