"""The contract between the verifier and an engine, which runs the target: steps, data in and data out.

A *step* is one call: pieces of work of several sequences, as one forward if the engine can. The caller decides what
goes into a step (:mod:`moa_server.scheduling.scheduler`); the engine knows no sessions, connections or deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moa_drafter.config import check_fit, longest_context
from moa_runtime.bundle import tokenizer_fingerprint
from moa_runtime.errors import MoaError
from moa_runtime.manifest import TOKENIZER_FILE, Fingerprints
from moa_runtime.session.events import Sampling, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from moa_drafter.config import DrafterConfig, RivalConfig

_log = logging.getLogger(__name__)

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of an engine, as reported in the Welcome.

    Attributes:
        trees: whether it verifies trees; else chains only.
        max_draft_tokens: largest number of tokens of a draft.
        schedules_itself: whether the engine decides by itself what goes into a forward. It then gets each request at
            once, in a call of its own, which is cancelled if the request is dropped.
        row_states: states of the target that memory rows can be made from.
    """

    trees: bool = True
    max_draft_tokens: int = 1024
    schedules_itself: bool = False
    row_states: tuple[str, ...] = ("keys_values", "last_hidden", "inner_hidden")


_numbers = itertools.count(1)


def new_sequence() -> int:
    """A number that no other sequence of this process has."""
    return next(_numbers)


@dataclass(frozen=True)
class StepRequest:
    """One sequence's piece of work.

    Every request names its whole prefix, so caches synchronise themselves: entries that no longer match are dropped,
    and missing ones are computed: all entries, if the sequence was released or evicted.

    Attributes:
        sequence: a number that the caller gave to the conversation (:func:`new_sequence`); a new one is empty.
        prefix: all tokens of the sequence that the step has to have processed at its end; at least one.
        draft, parents: a tree as in :mod:`moa_runtime.session.tree`, verified after the prefix; may be empty.
        sampling: how the target chooses tokens after the prefix and in the draft. None for a piece of prefill: the
            target chooses no token, and the sequence keeps all entries that it holds.
        rows_from: position of the first wanted memory row; None for none.
        expected: number of tokens of the whole prefix, if ``prefix`` is only a part of it; else 0. Memory for all of
            them at once saves copies.
    """

    sequence: int
    prefix: Sequence[int]
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()
    sampling: Sampling | None = None
    rows_from: int | None = None
    expected: int = 0


@dataclass(frozen=True)
class Rows:
    """Raw memory rows of the tokens from position ``start`` on: keys and values, float32 ``[n, heads, size]`` each."""

    start: int
    keys: Float32
    values: Float32

    @property
    def stop(self) -> int:
        return self.start + len(self.keys)


@dataclass(frozen=True, eq=False)
class Span:
    """The tokens of a sequence from position ``start`` up to ``stop``, which is left out.

    Attributes:
        held: the sequence's states, with ``read`` and ``features`` of :class:`moa_server.engine.target_pass.Cache`.
    """

    held: Any
    start: int
    stop: int


def chunks(spans: Sequence[Span], most: int) -> Iterator[list[tuple[Span, Span]]]:
    """Cut spans into parts and yield chunks of at most ``most`` tokens: pairs of a span and a part of it.

    An empty span has one empty part, so that the shape of its rows is known.
    """
    chunk: list[tuple[Span, Span]] = []
    free = most
    for span in spans:
        start = span.start
        while True:
            stop = max(start, min(start + free, span.stop))
            chunk.append((span, Span(span.held, start, stop)))
            free -= stop - start
            start = stop
            if not free:
                yield chunk
                chunk, free = [], most
            if start >= span.stop:
                break
    if chunk:
        yield chunk


class RowMaker(Protocol):
    """Makes memory rows: the server half of a drafter."""

    def of(self, spans: Sequence[Span | None]) -> list[Rows | None]:
        """Return the rows of each span, None for None. Except for rounding, they do not depend on the other spans."""


def joined(parts: Sequence[Rows]) -> Rows:
    """Join rows that follow each other; there is at least one part."""
    if len(parts) == 1:
        return parts[0]
    keys, values = (np.concatenate([getattr(part, half) for part in parts]) for half in ("keys", "values"))
    return Rows(parts[0].start, keys, values)


@dataclass(frozen=True)
class Outcome:
    """Result of a request.

    Attributes:
        path: the draft's indices of the accepted tokens, as :func:`moa_runtime.session.tree.accepted_path` returns
            them. The cache then holds the prefix and these tokens.
        token: the target's own choice after the path; None for a piece of prefill.
        rows: memory rows from the request's ``rows_from`` to the end of the path; None if none were requested, or the
            drafter reads no rows.
        done: False if the engine could not do the work in this step, for example because it was preempted: retry.
        logprobs: log-probabilities of the path and the token, if the request's sampling asks for them.
    """

    path: tuple[int, ...] = ()
    token: int | None = None
    rows: Rows | None = None
    done: bool = True
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class EngineFacts:
    """Facts about a loaded engine, for people.

    Attributes:
        dtype, device: of the target.
        target_pass: the pass that computes the target: ``onnx``, ``fused``, ``general`` or ``vllm``.
        batch_invariant: whether the other requests of a step leave every bit of a result unchanged.
        cache_bytes: largest size of the caches.
        perplexity_ratio: perplexity of the rounded checkpoint divided by the original's; None if it was not rounded.
    """

    dtype: str
    device: str
    target_pass: str
    batch_invariant: bool
    cache_bytes: int
    perplexity_ratio: float | None = None


class Engine(Protocol):
    """A loaded target with the drafter's server half. Not thread-safe: one caller, one event loop at a time."""

    @property
    def fingerprints(self) -> Fingerprints: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer_file(self) -> Path | None:
        """The target's ``tokenizer.json``; None if there is none."""

    @property
    def stop_tokens(self) -> Sequence[int]: ...

    @property
    def max_context(self) -> int: ...

    @property
    def forwards(self) -> int:
        """Forward passes of the target so far, all sequences together."""

    @property
    def cache_use(self) -> tuple[int, int]:
        """Number of tokens in the caches, and its limit."""

    @property
    def tokens_reused(self) -> int | None:
        """Number of tokens so far that were not computed, because an earlier conversation began with the same tokens;
        None if the engine does not count them."""

    def share(self, sequence: int, owner: str) -> None:
        """Let a sequence share its first tokens with other sequences of the same owner. Called once, before the
        sequence's first step."""

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        """Return how many leading tokens of ``prefix`` need not be computed again. Never called during a step."""

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        """Do the work of several sequences, at most one request each; return the outcomes in the order of the requests.

        Raises:
            Exception: the step failed. Sequences that took part may have lost their caches, but stay usable.
        """

    def release(self, sequence: int) -> None:
        """Forget a sequence and free its cache. Never called during a step that it takes part in."""

    def close(self) -> None:
        """Free the engine's memory. No method is called afterwards."""


class LoadedTarget(Protocol):
    """A target, with its weights or without.

    Attributes:
        config: the fields of its ``config.json``, as attributes.
        stop_tokens: ids that end the assistant's turn, ascending.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> Any: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...


class LoadedDrafter(Protocol):
    """A drafter's checkpoint."""

    @property
    def config(self) -> DrafterConfig | RivalConfig: ...


class EngineError(MoaError):
    """Target, drafter and settings do not fit together."""


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return a type by its name; ``auto`` is float32 on a CPU, else bfloat16. Raises EngineError for other names."""
    import torch  # late: callers of engines need none

    types = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}
    types |= {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in types:
        raise EngineError(f"the type {name} is not supported: choose {', '.join(types)}", code="unknown_type")
    return types[name]


def context_of(target: LoadedTarget, wanted: int | None, spare: int = 0, *, windows: bool = False) -> int:
    """Return the context in tokens.

    Args:
        spare: tokens of it that the engine needs itself.
        windows: see :func:`moa_drafter.config.longest_context`.

    Raises:
        EngineError: ``wanted`` is more than the target can hold, or too little for any answer.
    """
    longest, reason = longest_context(target.config, windows=windows)
    own = longest - spare
    if wanted is not None and not 2 <= wanted <= own:
        text = f"a context of {wanted} tokens was asked for, this target can hold 2 to {own}: {reason}"
        raise EngineError(text, code="out_of_range")
    return own if wanted is None else wanted


class TargetEngine(ABC):
    """A loaded target, the server half of its drafter (or none), and a thread of the engine's own that runs the steps.
    A subclass sets ``_bound``, the size of its cache.

    Args:
        spare, windows: see :func:`context_of`.

    Attributes:
        forwards: forward passes of the target so far.

    Raises:
        FitError: the drafter is of another target.
        EngineError: see :func:`context_of`.
    """

    _bound: int

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None,
        drafter_fingerprint: str,
        max_context: int | None,
        spare: int = 0,
        *,
        windows: bool = False,
    ) -> None:
        self.tokenizer_file = target.folder / TOKENIZER_FILE
        tokenizer = tokenizer_fingerprint(self.tokenizer_file)
        self.fingerprints = Fingerprints(target.fingerprint, tokenizer, drafter_fingerprint)
        self.vocab_size, self.stop_tokens = int(target.config.vocab_size), target.stop_tokens
        self.max_context = context_of(target, max_context, spare, windows=windows)
        self.forwards, self.drafter = 0, drafter
        if drafter is not None and (note := check_fit(drafter.config, target)):
            _log.warning(note)
        self._worker = ThreadPoolExecutor(1, "target")

    @abstractmethod
    def release(self, sequence: int) -> None:
        """See :meth:`Engine.release`."""

    @abstractmethod
    def _need(self, request: StepRequest) -> int:
        """Return the share of the cache that the request's sequence takes in the step."""

    @abstractmethod
    def _run(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        """Do valid requests that fit into the cache together."""

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        """See :meth:`Engine.step`.

        Raises:
            ValueError: a request is invalid or exceeds the cache.
        """
        return await asyncio.get_running_loop().run_in_executor(self._worker, self.step_now, requests)

    def step_now(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        """Do :meth:`step` in the calling thread, for the engine's only caller, if it has no event loop."""
        for request in requests:
            self._check(request)
        try:
            return [outcome for group in self._groups(requests) for outcome in self._run(group)]
        except BaseException:
            for request in requests:  # some layers may have the new tokens and others not
                self.release(request.sequence)
            raise

    def _check(self, request: StepRequest) -> None:
        if not request.prefix:
            raise ValueError("a request needs at least one token of prefix")
        if request.sampling is None and request.draft:
            raise ValueError("a draft was given, and no sampling to verify it with")
        if request.rows_from is not None and self.drafter is None:
            raise ValueError("memory rows were asked of an engine without a drafter")

    def _groups(self, requests: Sequence[StepRequest]) -> list[list[StepRequest]]:
        """Split requests into groups that fit into the cache: one group, unless the cache is crowded."""
        groups: list[list[StepRequest]] = []
        free = 0
        for request in requests:
            if not groups or self._need(request) > free:
                groups.append([])
                free = self._bound
            groups[-1].append(request)
            free -= self._need(request)
        return groups
