"""The engine of one machine: requests become pieces of a forward pass, and its logits choices and memory rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from moa_decoder.weights import DecoderWeights
from moa_runtime.session.events import TokenLogprobs
from moa_runtime.session.tree import chain, path_to, walk
from moa_server.engine.base import (
    Capabilities,
    EngineFacts,
    LoadedDrafter,
    LoadedTarget,
    Outcome,
    RowMaker,
    Span,
    StepRequest,
    TargetEngine,
)
from moa_server.engine.sampling import Chooser
from moa_server.engine.sequence_caches import SequenceCaches, SequenceState
from moa_server.engine.target_pass import Hidden, Piece, TargetPass, rounded_up


@dataclass
class RequestState:
    """A request during a step.

    Attributes:
        waiting: tokens of the prefix that are not processed yet.
        hidden: last hidden states after the prefix and each draft token, once known.
        chooser: of the tokens after the prefix; None if nothing is chosen.
        prepared: done when the masks of its grammar are there; None without one.
    """

    request: StepRequest
    state: SequenceState
    waiting: list[int] = field(default_factory=list)
    hidden: Hidden = None
    chooser: Chooser | None = None
    prepared: Future[None] | None = None

    @property
    def choosing(self) -> bool:
        """Whether the target chooses a token after the prefix."""
        return self.request.sampling is not None

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the chosen tokens, if they are asked for."""
        return () if self.chooser is None else tuple(self.chooser.logprobs)

    @property
    def rows_wanted(self) -> Span | None:
        """The tokens whose memory rows are wanted, once all are processed."""
        start, cache = self.request.rows_from, self.state.cache
        if start is None or cache is None:
            return None
        return Span(cache, start, len(self.state.tokens if self.choosing else self.request.prefix))

    def piece(self, part: list[int], draft: list[int]) -> Piece:
        """The next tokens of the prefix, and the draft or nothing, for a forward."""
        cache, state, parents = self.state.cache, self.state, self.request.parents if draft else ()
        assert cache is not None
        if not parents or list(parents) == chain(len(draft)):
            return Piece(cache, len(state.tokens), part + draft, drafted=len(draft))
        if len(part) == 1 and state.tokens:  # the tree's root: one tile of attention in the place of two
            return Piece(cache, len(state.tokens), (), part + draft, [0, *(1 + parent for parent in parents)])
        return Piece(cache, len(state.tokens), part, draft, parents)


#: Most tokens of prefill in one forward, and most memory rows computed at once; bounds the memory they take.
CHUNK = 512
#: Tokens of a draft that fit into the cache after a full context.
_DRAFT_ROOM = 128


#: Tokens of a draft for a target that takes chains only, whose states are kept token by token.
_MOST_IN_CHAIN = 16


class LocalEngine(TargetEngine):
    """Implements :class:`moa_server.engine.base.Engine`: a target's forward pass, and the caches of all sequences.

    Args:
        target_pass: of the target; keeps the last hidden states if ``rows`` are made from them.
        drafter: with its fingerprint; None for none.
        rows: makes the drafter's memory rows; None for none.
        max_context: tokens of a conversation; the target's own limit when omitted.
        weights: of the target, for a drafter beside it; None if the pass alone has them.
        cache_tokens: tokens that the caches of all sequences may take up together; at least the context and a draft.

    Raises:
        FitError: the drafter is of another target.
        EngineError: see :func:`moa_server.engine.base.context_of`.
    """

    def __init__(
        self,
        target: LoadedTarget,
        target_pass: TargetPass,
        drafter: LoadedDrafter | None = None,
        drafter_fingerprint: str = "",
        rows: RowMaker | None = None,
        max_context: int | None = None,
        cache_tokens: int = 32768,
        *,
        weights: DecoderWeights | None = None,
    ) -> None:
        super().__init__(target, drafter, drafter_fingerprint, max_context, windows=target_pass.windows)
        self.target, self.target_pass, self._rows = target, target_pass, rows
        self.weights = weights
        self.capabilities = (
            Capabilities() if target_pass.trees else Capabilities(trees=False, max_draft_tokens=_MOST_IN_CHAIN)
        )
        self.perplexity_ratio: float | None = None
        self._bound = rounded_up(max(cache_tokens, self.max_context + _DRAFT_ROOM))
        self._grammars = ThreadPoolExecutor(1, "grammars of a step")
        self._sequences = SequenceCaches(target_pass.cache_shape.new_cache, self._bound)

    @property
    def makes_rows(self) -> bool:
        """Whether memory rows can be asked for."""
        return self._rows is not None

    @property
    def facts(self) -> EngineFacts:
        """Facts for :mod:`moa_server.doctor`."""
        own = self.target_pass
        cache_bytes = own.cache_shape.token_bytes * self._bound
        facts = own.dtype, own.device, own.name, own.batch_invariant, cache_bytes, self.perplexity_ratio
        return EngineFacts(*facts)

    @property
    def cache_use(self) -> tuple[int, int]:
        """See :attr:`moa_server.engine.base.Engine.cache_use`."""
        return self._sequences.tokens_taken, self._bound

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        """See :meth:`moa_server.engine.base.Engine.held`."""
        return self._sequences.held(sequence, prefix)

    @property
    def tokens_reused(self) -> int:
        """See :attr:`moa_server.engine.base.Engine.tokens_reused`."""
        return self._sequences.tokens_reused

    def share(self, sequence: int, owner: str) -> None:
        """See :meth:`moa_server.engine.base.Engine.share`."""
        self._sequences.share(sequence, owner)

    def release(self, sequence: int) -> None:
        """See :meth:`moa_server.engine.base.Engine.release`."""
        self._sequences.release(sequence)

    def close(self) -> None:
        """See :meth:`moa_server.engine.base.Engine.close`."""
        self._worker.shutdown()
        self._grammars.shutdown()
        self._sequences.clear()

    def _check(self, request: StepRequest) -> None:
        super()._check(request)
        if _most(request) > self._bound:
            raise ValueError(f"{_most(request)} tokens do not fit into a cache of {self._bound}")

    def _need(self, request: StepRequest) -> int:
        return self._sequences.need(request.sequence, _most(request))

    def _run(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        for request in requests:
            self._sequences.open(request.sequence, request.prefix)
        self._sequences.allocate({request.sequence: _most(request) for request in requests})
        work = [self._begun(request) for request in requests]
        while batch := self._next_batch(work):
            self._forward(batch)
        chosen = self._choose([each for each in work if each.choosing])
        self._sequences.keep_blocks(request.sequence for request in requests)
        rows = [None] * len(work) if self._rows is None else self._rows.of([each.rows_wanted for each in work])
        choices = [chosen.get(each.request.sequence, ((), None)) for each in work]
        parts = zip(work, choices, rows, strict=True)
        return [Outcome(path, token, own, logprobs=each.logprobs) for each, (path, token), own in parts]

    def _begun(self, request: StepRequest) -> RequestState:
        self._sequences.reuse(request.sequence, request.prefix)
        state = self._sequences[request.sequence]
        if request.sampling is not None:  # the last token's hidden state is needed
            state.cut(len(request.prefix) - 1)
        if state.cache is not None and len(state.tokens) < len(request.prefix):
            state.cut(state.cache.resumable(len(state.tokens)))
        begun = RequestState(request, state, list(request.prefix[len(state.tokens) :]))
        if request.sampling is not None:
            begun.chooser = Chooser(request.sampling, request.prefix, self.stop_tokens)
            if request.sampling.grammar is not None:
                parents = list(request.parents) or chain(len(request.draft))
                begun.prepared = self._grammars.submit(begun.chooser.prepare, request.draft, parents)
        return begun

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
        logits = self.target_pass.logits([each.hidden for each in work])
        chosen = {}
        first = 0
        for each in work:
            request = each.request
            parents = list(request.parents) or chain(len(request.draft))
            assert each.chooser is not None
            chooser, own = each.chooser, first
            if each.prepared is not None:
                each.prepared.result()

            def choice(
                node: int,
                chooser: Chooser = chooser,
                draft: Sequence[int] = request.draft,
                parents: list[int] = parents,
                own: int = own,
            ) -> int:
                return chooser.choose(logits[own + node], path_to(node, draft, parents))

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
