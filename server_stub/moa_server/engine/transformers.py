"""The engine that runs a target loaded with transformers, and the drafter's server half beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moa_drafter.drafter import Drafter
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target, deviation_from_transformers, load_target
from moa_runtime.session.tree import chain, depths, walk
from moa_server.engine.base import Capabilities, EngineError, EngineFacts, Outcome, StepRequest, TargetEngine, dtype_of
from moa_server.engine.forward import GeneralPass, Piece, TargetPass
from moa_server.engine.fused_llama import FusedLlama, is_invariant, misfit
from moa_server.engine.kv_cache import KVCache, SequenceCaches, SequenceState, rounded_up
from moa_server.engine.memory_rows import MemoryRows, Span, load_drafter
from moa_server.engine.packed_linear import can_pack
from moa_server.engine.sampling import choose

_log = logging.getLogger(__name__)

#: Tokens of the comparison with transformers' own forward: a chain, a single token, and the right path of a tree.
_CHAIN = 6
#: The tree of the comparison, in which the first and the second right token each have a wrong sibling.
_TREE, _PARENTS = (1, 3, 4, 5, 6), (0, 0, 2, 2, 4, 5, 6)
#: Largest accepted difference, relative to the size of the compared values. A wrong pass differs by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
#: Exceptions of transformers' own code when a model family does not support a way of running it.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)


def target_pass(target: Target, dtype: torch.dtype, *, keep_last: bool = False) -> tuple[TargetPass, bool]:
    """Return the fused pass if it computes what transformers computes, otherwise the general one.

    Returns:
        the pass, and whether its results are bit-identical whatever else is in the step.

    Raises:
        EngineError: neither pass computes it.
    """
    reason = misfit(target)
    if reason is None:
        try:
            fused = FusedLlama(target, dtype, keep_last=keep_last)
            error = deviation(fused, target)
        except _FAILURES as failure:
            reason = _first_line(failure)
        else:
            if error <= _TOLERANCE[dtype]:
                return fused, _invariant(fused, target, dtype)
            reason = f"it differs from transformers by {error:.2g}"
    _log.info("the target runs through transformers' own forward, which is slower: %s", reason)
    name = f"the target in {target.folder}, of the architecture {target.config.model_type!r},"
    try:
        general = GeneralPass(target, keep_last=keep_last)
        error = deviation(general, target)
    except _FAILURES as failure:
        text = f"{name} cannot be run piece by piece: {_first_line(failure)}"
        raise EngineError(text, code="unsupported_target") from failure
    if error > 3 * _TOLERANCE[target.model.dtype]:  # rounding may choose other experts
        text = f"{name} computes otherwise piece by piece: its states differ by {error:.2g}"
        raise EngineError(text, code="wrong_results")
    return general, False


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


def _invariant(fused: FusedLlama, target: Target, dtype: torch.dtype) -> bool:
    """Whether bit-identical results can be promised: only for packed matrices, on a processor that keeps them."""
    config = target.model.config
    if target.device.type != "cpu" or not can_pack(dtype):
        return False
    invariant = is_invariant(fused, config.vocab_size, config.max_position_embeddings)
    if not invariant:
        _log.info("on this processor the target's choices may depend, in the last bits, on what else is in a step")
    return invariant


@torch.inference_mode()
def deviation(candidate: TargetPass, target: Target) -> float:
    """Return the deviation of a pass, see :func:`moa_drafter.target.deviation_from_transformers`."""

    def compute(text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        cache = KVCache(candidate.cache_shape, len(text) + len(_PARENTS))
        path, wrong = text[_CHAIN + 1 :], text[0]
        tree = [path[_TREE.index(index)] if index in _TREE else wrong for index in range(len(_PARENTS))]
        pieces = [
            Piece(cache, 0, text[:_CHAIN], shift=start),
            Piece(cache, _CHAIN, text[_CHAIN : _CHAIN + 1], shift=start),
            Piece(cache, _CHAIN + 1, (), tree, _PARENTS, shift=start),
        ]
        states = [candidate.forward([piece])[0] for piece in pieces]
        hidden = torch.cat((*states[:2], states[2][list(_TREE)]))
        return hidden, candidate.logits(hidden)

    return deviation_from_transformers(target, _CHAIN + 1 + len(_TREE), compute)


@dataclass
class RequestState:
    """A request during a step.

    Attributes:
        waiting: tokens of the prefix that are not processed yet.
        hidden: last hidden states after the prefix and each draft token, once known.
    """

    request: StepRequest
    state: SequenceState
    waiting: list[int] = field(default_factory=list)
    hidden: Tensor | None = None

    @property
    def choosing(self) -> bool:
        """Whether the target chooses a token after the prefix."""
        return self.request.sampling is not None

    @property
    def rows_wanted(self) -> Span | None:
        """The tokens whose memory rows are wanted, once all are processed."""
        start, cache = self.request.rows_from, self.state.cache
        if start is None or cache is None:
            return None
        return Span(cache, start, len(self.state.tokens if self.choosing else self.request.prefix))

    def piece(self, part: list[int], draft: list[int]) -> Piece:
        """The next tokens of the prefix, and the draft or nothing, for a forward."""
        cache, state, parents = self.state.cache, self.state, self.request.parents
        assert cache is not None
        if not parents or list(parents) == chain(len(draft)):
            return Piece(cache, len(state.tokens), part + draft)
        if len(part) == 1 and state.tokens:  # the tree's root: one tile of attention in the place of two
            return Piece(cache, len(state.tokens), (), part + draft, [0, *(1 + parent for parent in parents)])
        return Piece(cache, len(state.tokens), part, draft, parents if draft else ())


#: Most tokens of prefill in one forward, and most memory rows computed at once; bounds the memory they take.
CHUNK = 512
#: Tokens of a draft that fit into the cache after a full context.
_DRAFT_ROOM = 128


class TransformersEngine(TargetEngine):
    """Implements :class:`moa_server.engine.base.Engine`: a target, and the caches of all sequences.

    Args:
        drafter: with its fingerprint; without one, or with one that reads nothing, there are no memory rows.
        max_context: tokens of a conversation; the target's own limit when omitted.
        dtype: of the products, "float32" or "bfloat16"; "auto" is float32 on a CPU, bfloat16 elsewhere.
        cache_tokens: tokens that the caches of all sequences may take up together; at least the context and a draft.
        release_weights: free the weights of the target's own layers if the pass has its own; only the engine can use
            the target afterwards.

    Attributes:
        row_reads: states of the target that memory rows are made from.
        batch_invariant: whether each sequence's results are bit-identical whatever else is in its steps.

    Raises:
        EngineError: target, drafter and settings do not fit together.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        drafter_fingerprint: str = "",
        max_context: int | None = None,
        *,
        dtype: str = "auto",
        cache_tokens: int = 32768,
        release_weights: bool = False,
    ) -> None:
        super().__init__(target, drafter, drafter_fingerprint, max_context)
        products, self.target = dtype_of(dtype, target.device), target
        self._rows = MemoryRows(drafter, products)
        self.row_reads = self._rows.reads
        if isinstance(drafter, MoADrafter) and not drafter.is_whole:
            drafter.bind_target(target.embedding, target.head, target.layers)  # as long as they have weights
        self.target_pass, self.batch_invariant = target_pass(target, products, keep_last=self.row_reads.last)
        if release_weights and self.target_pass.has_own_weights:
            for parameter in (each for layer in target.layers for each in layer.parameters()):
                parameter.data = parameter.data.new_empty(0)
        self._bound = rounded_up(max(cache_tokens, self.max_context + _DRAFT_ROOM))
        self._sequences = SequenceCaches(self.target_pass.cache_shape, self._bound)

    @classmethod
    def load(
        cls,
        target_name: str,
        drafter_folder: Path | None,
        device: str = "cpu",
        max_context: int | None = None,
        *,
        dtype: str = "auto",
        **settings: Any,
    ) -> TransformersEngine:
        """Load target and drafter; for the other arguments and ``settings`` see the class.

        Raises:
            MoaError: target or drafter is missing, unreadable, or does not fit.
        """
        drafter, fingerprint = load_drafter(drafter_folder, device)  # the quicker one to fail first
        target = load_target(target_name, device=device, dtype=dtype_of(dtype, torch.device(device)))
        return cls(target, drafter, fingerprint, max_context, dtype=dtype, **settings)

    @property
    def facts(self) -> EngineFacts:
        """Facts for :mod:`moa_server.doctor`."""
        dtype, size = self.target.model.dtype, self.target_pass.cache_shape.token_bytes * self._bound
        return EngineFacts(str(dtype).removeprefix("torch."), self.target.device.type, self.batch_invariant, size)

    @property
    def cache_use(self) -> tuple[int, int]:
        """See :attr:`moa_server.engine.base.Engine.cache_use`."""
        return self._sequences.tokens_taken, self._bound

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        """See :meth:`moa_server.engine.base.Engine.held`."""
        return self._sequences.agreed(sequence, prefix)

    def release(self, sequence: int) -> None:
        """See :meth:`moa_server.engine.base.Engine.release`."""
        self._sequences.release(sequence)

    def close(self) -> None:
        """See :meth:`moa_server.engine.base.Engine.close`."""
        self._worker.shutdown()
        self._sequences.clear()

    def _check(self, request: StepRequest) -> None:
        super()._check(request)
        if _most(request) > self._bound:
            raise ValueError(f"{_most(request)} tokens do not fit into a cache of {self._bound}")

    def _need(self, request: StepRequest) -> int:
        return self._sequences.need(request.sequence, _most(request))

    @torch.inference_mode()
    def _run(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        work = [self._opened(request) for request in requests]
        self._sequences.allocate({request.sequence: _most(request) for request in requests})
        while batch := self._next_batch(work):
            self._forward(batch)
        chosen = self._choose([each for each in work if each.choosing])
        rows = self._rows.of([each.rows_wanted for each in work])
        choices = [chosen.get(each.request.sequence, ((), None)) for each in work]
        return [Outcome(path, token, own) for (path, token), own in zip(choices, rows, strict=True)]

    def _opened(self, request: StepRequest) -> RequestState:
        state = self._sequences.opened(request.sequence, request.prefix)
        if request.sampling is not None:  # the last token's hidden state is needed
            del state.tokens[len(request.prefix) - 1 :]
        return RequestState(request, state, list(request.prefix[len(state.tokens) :]))

    def _next_batch(self, work: Sequence[RequestState]) -> list[tuple[RequestState, Piece]]:
        """Pieces of at most ``CHUNK`` tokens in all, one of each sequence; a draft stays with the token before it."""
        batch: list[tuple[RequestState, Piece]] = []
        free = CHUNK
        for each in work:
            if not each.waiting or (batch and free < 1):
                continue
            draft = list(each.request.draft)
            whole = len(each.waiting) + len(draft)
            part = each.waiting
            if whole > free and (len(part) > 1 or batch):
                # If something is chosen, at least one token is left for the draft to hang from.
                part, draft = part[: min(free, len(part) - each.choosing)], []
            if part:
                piece = each.piece(part, draft)
                batch.append((each, piece))
                free -= len(piece)
        return batch

    def _forward(self, batch: Sequence[tuple[RequestState, Piece]]) -> None:
        hidden, count = self.target_pass.forward([piece for _, piece in batch])
        self.forwards += count
        first = 0
        for each, piece in batch:
            own = hidden[first : first + len(piece)]
            first += len(piece)
            if self.row_reads.last:
                piece.cache.last[piece.cached : piece.cached + len(piece)] = own
            new = len(piece) if not each.request.draft else min(len(piece), len(each.waiting))
            each.state.tokens += each.waiting[:new]
            each.waiting = each.waiting[new:]
            if not each.waiting:
                each.hidden = own[new - 1 :]

    def _choose(self, work: Sequence[RequestState]) -> dict[int, tuple[tuple[int, ...], int]]:
        """Walk down each draft, and let the caches hold the accepted paths.

        Returns:
            path and the token after it, by sequence.
        """
        if not work:
            return {}
        logits = self.target_pass.logits(torch.cat([each.hidden for each in work if each.hidden is not None]))
        chosen = {}
        first = 0
        for each in work:
            request = each.request
            parents = list(request.parents) or chain(len(request.draft))
            levels, own = [0, *depths(parents)], first

            def choice(node: int, request: StepRequest = request, levels: list[int] = levels, own: int = own) -> int:
                assert request.sampling is not None
                row = logits[own + node].cpu().numpy()
                return choose(row, request.sampling, len(request.prefix) + levels[node])

            path, token = walk(request.draft, parents, choice)
            first += 1 + len(request.draft)
            if each.state.cache is not None:
                each.state.cache.keep(len(each.state.tokens), path)
            each.state.tokens += [request.draft[index] for index in path]
            chosen[request.sequence] = (tuple(path), token)
        return chosen


def _most(request: StepRequest) -> int:
    """Tokens that the sequence's cache must hold, now or soon."""
    return max(request.expected, len(request.prefix) + len(request.draft))
