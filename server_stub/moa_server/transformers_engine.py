"""The engine that runs the target with transformers, and the drafter's server half beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moa_drafter.checkpoint import drafter_fingerprint, load_checkpoint
from moa_drafter.drafter import Drafter
from moa_drafter.fit import check_fit
from moa_drafter.layout import lay_out_for_few_rows
from moa_drafter.states import Reads, TargetStates, layer_keys_values
from moa_drafter.target import Target, load_target
from moa_runtime.bundle import TOKENIZER_FILE, tokenizer_fingerprint
from moa_runtime.errors import MoaError
from moa_runtime.session.handshake import Fingerprints
from moa_runtime.session.server import Sampling
from moa_runtime.session.tree import chain, depths
from moa_server.kv_cache import KeyValueCache
from moa_server.sampling import choose
from moa_server.tree_mask import tree_mask

Float32 = NDArray[np.float32]

#: Most tokens of a prefill in one forward, and most memory rows computed at once; bounds the memory they take.
CHUNK = 512

_log = logging.getLogger(__name__)


class EngineError(MoaError):
    """A target and a drafter that do not fit together, or a context that the target cannot hold."""


class TransformersEngine:
    """A target, the server half of its drafter (or none), and a count of forwards. For one thread.

    On a CPU the target's layers are laid out for few rows (:mod:`moa_drafter.layout`).

    Args:
        drafter: with its fingerprint; without one, or with one that reads nothing, there are no memory rows.
        max_context: tokens of a conversation; the target's own limit when omitted.

    Raises:
        EngineError: see there.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        drafter_fingerprint: str = "",
        max_context: int | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.fingerprints = Fingerprints(
            target.fingerprint, tokenizer_fingerprint(target.folder / TOKENIZER_FILE), drafter_fingerprint
        )
        self.vocab_size = int(target.model.config.vocab_size)
        self.stop_tokens = target.stop_tokens
        self.max_context = _context(target, max_context)
        self.forwards = 0
        #: What of the target is made into memory rows.
        self.row_reads = Reads() if drafter is None else drafter.row_reads
        if drafter is not None and (note := check_fit(drafter.config, target)):
            _log.warning(note)
        if target.device.type == "cpu":
            for layer in target.layers:  # the head stays as it is: where it is the embedding too, rows are picked of it
                lay_out_for_few_rows(layer)

    @classmethod
    def load(
        cls, target_name: str, drafter_folder: Path | None, device: str = "cpu", max_context: int | None = None
    ) -> TransformersEngine:
        """Load target and drafter.

        Raises:
            MoaError: what cannot be found, read, or does not fit together.
        """
        if drafter_folder is None:
            return cls(load_target(target_name, device=device), max_context=max_context)
        drafter = load_checkpoint(drafter_folder)  # the quicker one to fail first
        target = load_target(target_name, device=device)
        return cls(target, drafter.to(target.device), drafter_fingerprint(drafter_folder), max_context)

    def open(self) -> TransformersSequence:
        """A new, empty sequence."""
        return TransformersSequence(self)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], positions: Tensor, mask: Tensor, cache: KeyValueCache) -> Tensor:
        """One pass of the target; ``cache`` grows by the tokens.

        Args:
            positions: absolute positions, int64 ``[n]``.
            mask: boolean ``[n, cached + n]``, true where a token may look.

        Returns:
            normed last hidden states ``[n, hidden]``.
        """
        self.forwards += 1
        device = self.target.device
        out = self.target.model.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=positions[None].to(device),
            # A mask of our own makes transformers build none. A single token needs none at all.
            attention_mask=None if len(tokens) == 1 else mask[None, None].to(device),
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Float32:
        """``[n, hidden]`` -> float32 logits ``[n, vocab_size]``."""
        return self.target.model.get_output_embeddings()(hidden).float().cpu().numpy()


class TransformersSequence:
    """See :class:`moa_server.engine.TargetSequence`.

    The cache holds ``_tokens``, and after them, between :meth:`verify` and :meth:`keep`, the draft. ``_last [n,
    hidden]`` are their last hidden states, where memory rows are made from those.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._tokens: list[int] = []
        self._draft: list[int] = []
        self._cache, self._last = self._empty()

    def _empty(self) -> tuple[KeyValueCache, Tensor]:
        target = self._engine.target
        config = target.model.config
        return KeyValueCache(config.num_hidden_layers), target.embedding.new_empty(0, config.hidden_size)

    def verify(
        self, prefix: Sequence[int], draft: Sequence[int], parents: Sequence[int], sampling: Sampling
    ) -> list[int]:
        self._synchronise(prefix)
        waiting = list(prefix[len(self._tokens) :])
        while len(waiting) > 1 and len(waiting) + len(draft) > CHUNK:
            part, waiting = _split(waiting, CHUNK)
            self._forward(part, chain(len(part)))
            self._tokens += part
        # The chain of what is left of the prefix, with the draft's tree hanging from its end.
        root = len(waiting)
        hidden = self._forward([*waiting, *draft], chain(root) + [root + parent for parent in parents])
        self._tokens += waiting
        self._draft = list(draft)
        positions = [len(prefix)] + [len(prefix) + depth for depth in depths(parents)]
        logits = self._engine.logits(hidden[root - 1 :])
        return [choose(row, sampling, position) for row, position in zip(logits, positions, strict=True)]

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        held = len(self._tokens)
        self._cache.keep(held, path)
        if len(self._last):
            self._last = torch.cat((self._last[:held], self._last[held:][list(path)]))
        self._tokens += [self._draft[index] for index in path]
        self._draft = []

    @torch.inference_mode()
    def rows(self, positions: range) -> tuple[Float32, Float32] | None:
        drafter = self._engine.drafter
        if drafter is None:
            raise ValueError("memory rows were asked of an engine without a drafter")
        if not self._engine.row_reads:
            return None
        if positions.stop > len(self._tokens) or positions.step != 1:
            raise ValueError(f"memory rows of {positions} were asked, {len(self._tokens)} tokens are processed")
        weight = next(drafter.parameters())
        # At least one part, empty if need be, for the shape of its rows.
        starts = range(positions.start, max(positions.stop, positions.start + 1), CHUNK)
        parts = []
        for start in starts:
            stop = min(start + CHUNK, positions.stop)
            rows = drafter.rows(self._states(start, stop, weight), torch.arange(start, stop, device=weight.device))
            parts.append([half.float().cpu().numpy() for half in rows])
        keys, values = (np.concatenate(halves) for halves in zip(*parts, strict=True))
        return keys, values

    def _states(self, start: int, stop: int, like: Tensor) -> TargetStates:
        """What the drafter reads of the tokens ``start`` to ``stop``, in the type of ``like``."""
        reads, nothing = self._engine.row_reads, like.new_empty(stop - start, 0, 0)
        kv, last = nothing, nothing.flatten(1)
        if reads.kv_layers:
            kv = layer_keys_values(self._cache.window(start, stop), reads.kv_layers).to(like)
        if reads.last:
            last = self._last[start:stop].to(like)
        return TargetStates(kv, nothing, last)

    def close(self) -> None:
        self._tokens, self._draft = [], []
        self._cache, self._last = self._empty()

    def _synchronise(self, prefix: Sequence[int]) -> None:
        """Cut the cache to what agrees with ``prefix``, whose last token is always computed again."""
        agreed = 0
        for own, token in zip(self._tokens, prefix[:-1], strict=False):
            if own != token:
                break
            agreed += 1
        del self._tokens[agreed:]
        self._draft = []
        self._cache.cut(agreed)
        self._last = self._last[:agreed]

    def _forward(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Run the tree ``tokens``, ``parents`` that hangs from the end of the cache."""
        cached = self._cache.length
        positions = torch.tensor(depths(parents)) + (cached - 1)
        try:
            hidden = self._engine.forward(tokens, positions, tree_mask(cached, parents), self._cache)
        except BaseException:
            self.close()  # some layers may have grown and others not
            raise
        if self._engine.row_reads.last:
            self._last = torch.cat((self._last, hidden))
        return hidden


def _split(waiting: list[int], most: int) -> tuple[list[int], list[int]]:
    """A first part of at most ``most`` tokens that leaves at least one."""
    size = min(most, len(waiting) - 1)
    return waiting[:size], waiting[size:]


def _context(target: Target, wanted: int | None) -> int:
    """The context in tokens; a sliding window counts as the limit, for the cache here keeps every token."""
    config = target.model.config
    own = min(filter(None, (config.max_position_embeddings, getattr(config, "sliding_window", None))))
    if wanted is None:
        return own
    if not 2 <= wanted <= own:
        raise EngineError(f"a context of {wanted} tokens was asked for, this target can hold 2 to {own}")
    return wanted
