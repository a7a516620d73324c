"""Engine that runs a target with vLLM, with the drafter's server half beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moa_drafter.architectures.eagle3 import Eagle3Drafter
from moa_drafter.config import Reads
from moa_drafter.drafter import Drafter
from moa_drafter.target import target_facts
from moa_drafter.target_facts import TargetFacts
from moa_drafter.target_folder import write_tensors
from moa_runtime.session.events import TokenLogprobs
from moa_runtime.session.tree import chain
from moa_runtime.tokens import common_length
from moa_server.engine.base import (
    Capabilities,
    EngineFacts,
    Outcome,
    Span,
    StepRequest,
    TargetEngine,
    dtype_of,
)
from moa_server.engine.memory_rows import MemoryRows, load_drafter
from moa_server.engine.sampling import Chooser
from moa_server.engine.target_pass import rounded_up
from moa_server.engine.torch_fusion import TorchFusion
from moa_server.engine.vllm.paged_cache import (
    BLOCK,
    MOST_DRAFTED,
    SPARE,
    PagedStates,
    block_bytes,
    check_device,
    check_memory,
)
from moa_server.scheduling.scheduler import MOST_SEQUENCES

if TYPE_CHECKING:
    from moa_server.engine.vllm.core import VllmCore


class Move(Enum):
    """How to bring a request of vLLM to a prefix."""

    #: It holds all of it.
    NOTHING = auto()
    #: The prefix is what it holds and the token that it chose last: a draft can be verified.
    GO_ON = auto()
    #: Its last tokens are replaced, and more follow.
    REWRITE = auto()
    #: Another request takes its place. What both begin with is found in vLLM's cache, but for part of a block.
    ANEW = auto()


@dataclass
class HeldSequence:
    """One sequence.

    Attributes:
        name: of vLLM's request.
        tokens: that are processed.
        chosen: the token after them, which the next step processes; None if it is to be replaced.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    chosen: int | None = None

    def move(self, prefix: Sequence[int], block: int, *, choosing: bool) -> tuple[Move, int]:
        """Return the move to ``prefix``, and the number of tokens that stay.

        Args:
            block: tokens of a block. One that is full may belong to several sequences.
            choosing: whether a token is chosen after the prefix: its last token is then processed in any case.
        """
        agreed = common_length(self.tokens, prefix)
        if not choosing and agreed == len(prefix):
            return Move.NOTHING, len(self.tokens)
        if agreed == len(self.tokens) == len(prefix) - 1 and self.chosen == prefix[-1]:
            return Move.GO_ON, agreed
        keep = min(agreed, len(prefix) - 1)
        if keep and keep >= len(self.tokens) // block * block:
            return Move.REWRITE, keep
        return Move.ANEW, 0


class RequestProgress:
    """One request. vLLM may need several of its own steps for it: for a long prefix, or a draft that does not fit into
    one. Each returned token is the next one of the draft or ends it, so it does not matter how it was cut.

    Attributes:
        draft: tokens that are still to be verified.
        accepted: number of those that were accepted.
        token: the target's choice after them.
        done: whether nothing is left to do.
        logprobs: of the accepted tokens and the choice, if they are asked for.
    """

    def __init__(self, request: StepRequest, held: HeldSequence, *, done: bool = False) -> None:
        self.request, self.held, self.done = request, held, done
        self.draft, self.accepted = list(request.draft), 0
        self.token: int | None = None
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self._chooser: Chooser | None = None

    @property
    def processed(self) -> list[int]:
        """Tokens that the sequence holds once all is done."""
        return [*self.request.prefix, *self.request.draft[: self.accepted]]

    def chooser(self, stop_tokens: Sequence[int]) -> Chooser | None:
        """Return what chooses after :attr:`processed` and along the draft; None if nothing is chosen."""
        sampling = self.request.sampling
        self._chooser = None if sampling is None else Chooser(sampling, self.processed, stop_tokens)
        return self._chooser

    def take(self, tokens: Sequence[int]) -> None:
        """Take the result of one of vLLM's steps: the accepted tokens, and the choice after them."""
        if self.request.sampling is None:
            self.held.tokens, self.held.chosen, self.done = list(self.request.prefix), None, True
            return
        if self._chooser is not None:  # vLLM also samples in the middle of a prefix
            self.logprobs += tuple(self._chooser.logprobs[: len(tokens)])
        for token in tokens:
            if not self.draft or token != self.draft[0]:
                self.token, self.done = token, True
                self.held.tokens, self.held.chosen = self.processed, token
                return
            del self.draft[0]
            self.accepted += 1


class VllmEngine(TargetEngine):
    """Implements :class:`moa_server.engine.base.Engine` for chains: a target that vLLM has loaded in the engine's
    thread, and a waiting request for each sequence.

    Args:
        drafter: with its fingerprint; without one, or with one that reads nothing, there are no memory rows.
        max_context: tokens of a conversation; by default two less than the target's own limit.
        dtype: of the target, "float32" or "bfloat16"; "auto" is float32 on a CPU, bfloat16 elsewhere.
        device: of the target, as torch names it.
        cache_tokens: tokens that the caches of all sequences may take up together; at least the context and a draft.
        threads: of the CPU that torch uses in a step; None for its own choice.

    Attributes:
        target: the target's embedding and head, which a drafter beside it shares.

    Raises:
        EngineError: vLLM cannot run the target, or lacks the states that the drafter's memory rows need.
        FitError: the drafter belongs to another target.
    """

    capabilities = Capabilities(trees=False, max_draft_tokens=MOST_DRAFTED, row_states=("keys_values", "inner_hidden"))
    tokens_reused = None

    def __init__(
        self,
        target: TargetFacts,
        drafter: Drafter | None = None,
        drafter_fingerprint: str = "",
        max_context: int | None = None,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        cache_tokens: int = 32768,
        threads: int | None = None,
    ) -> None:
        super().__init__(target, drafter, drafter_fingerprint, max_context, spare=SPARE, windows=True)
        self._fusion: TorchFusion | None = None
        if isinstance(drafter, Eagle3Drafter):
            drafter.config = drafter.config.for_layers(int(target.config.num_hidden_layers))
            self._fusion = TorchFusion(drafter)
        self.row_reads = Reads() if drafter is None else drafter.row_reads
        self._dtype, self._device = dtype_of(dtype, torch.device(device)), torch.device(device)
        self._block_bytes = block_bytes(target, self._dtype)
        self._bound = rounded_up(max(cache_tokens, self.max_context + MOST_DRAFTED), BLOCK) // BLOCK
        check_memory(target, self._dtype, self._bound, self._device)
        from moa_server.engine.vllm.core import VllmCore  # late: the rest of this module needs no vLLM

        self._held: dict[int, HeldSequence] = {}  # by the caller's numbers, the least recently used first
        self._owners: dict[int, str] = {}
        self._names = itertools.count(1)
        try:
            self._worker.submit(self._load, VllmCore, target, drafter, threads).result()
        except BaseException:
            self._worker.shutdown()
            raise

    def _load(self, core: type[VllmCore], target: TargetFacts, drafter: Drafter | None, threads: int | None) -> None:
        if threads is not None:  # of this thread: vLLM's loops ask OpenMP, which counts them for each
            torch.set_num_threads(threads)
        sequences = MOST_SEQUENCES + 1  # and a prompt
        self._core = core(target, self._dtype, self.max_context, self._bound, sequences, self._fusion)
        self.target = self._core.shared_weights
        self._rows = MemoryRows(drafter, self._dtype)
        self._layers = self._core.paged_layers() if self.row_reads.kv_layers else {}

    @classmethod
    def load(
        cls,
        target_name: str,
        drafter_folder: Path | None,
        device: str = "cpu",
        max_context: int | None = None,
        **settings: Any,
    ) -> VllmEngine:
        """Load target and drafter; for the other arguments and ``settings`` see the class.

        Raises:
            MoaError: target or drafter is missing, unreadable, or does not fit.
        """
        check_device(device)
        drafter, fingerprint = load_drafter(drafter_folder, device)
        target = target_facts(target_name)
        write_tensors(target.folder)
        return cls(target, drafter, fingerprint, max_context, device=device, **settings)

    @property
    def facts(self) -> EngineFacts:
        """Facts for :mod:`moa_server.doctor`."""
        dtype, size = str(self._dtype).removeprefix("torch."), self._block_bytes * self._bound
        return EngineFacts(dtype, self._device.type, "vllm", self._core.batch_invariant, size)

    @property
    def cache_use(self) -> tuple[int, int]:
        """See :attr:`moa_server.engine.base.Engine.cache_use`."""
        return (self._bound - self._core.free_blocks) * BLOCK, self._bound * BLOCK

    def share(self, sequence: int, owner: str) -> None:
        """See :meth:`moa_server.engine.base.Engine.share`."""
        self._owners[sequence] = f"owner {owner}"

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        """See :meth:`moa_server.engine.base.Engine.held`."""
        held = self._held.get(sequence)
        return 0 if held is None else common_length(held.tokens, prefix)

    def release(self, sequence: int) -> None:
        """See :meth:`moa_server.engine.base.Engine.release`; no step is under way."""
        self._owners.pop(sequence, None)
        self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            self._core.drop([held.name])

    def close(self) -> None:
        """See :meth:`moa_server.engine.base.Engine.close`."""
        self._worker.submit(self._core.close).result()
        self._worker.shutdown()

    def _check(self, request: StepRequest) -> None:
        super()._check(request)
        drafted, tokens = len(request.draft), len(request.prefix) + len(request.draft)
        if request.parents and list(request.parents) != chain(drafted):
            raise ValueError("this engine verifies chains only, and the draft is a tree")
        if drafted > MOST_DRAFTED or tokens > self.max_context:
            most = f"a context has {self.max_context}, a draft {MOST_DRAFTED}"
            raise ValueError(f"{tokens} tokens, {drafted} of them drafted, are too many: {most}")

    def _need(self, request: StepRequest) -> int:
        """See :meth:`TargetEngine._need`, in blocks."""
        whole = rounded_up(len(request.prefix) + len(request.draft) + 1, BLOCK) // BLOCK
        return max(whole, self._blocks_of(request.sequence))

    def _blocks_of(self, sequence: int) -> int:
        held = self._held.get(sequence)
        return 0 if held is None else len(self._core.table(held.name))

    def _run(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        missing = sum(self._need(request) - self._blocks_of(request.sequence) for request in requests)
        self._make_room(missing, {request.sequence for request in requests})
        works = [self._begun(request) for request in requests]
        while awake := [work for work in works if not work.done and not self._core.lost(work.held.name)]:
            drafts = {work.held.name: work.draft for work in awake}
            given = self._core.step(drafts, {work.held.name: work.chooser(self.stop_tokens) for work in awake})
            if given is None:
                break
            self.forwards += 1
            for work in awake:
                if work.held.name in given:
                    work.take(given[work.held.name])
                elif self._core.lost(work.held.name):  # else vLLM would resume it in a step of others
                    self._drop(work.request.sequence)
        rows = self._rows.of([self._rows_wanted(work) for work in works])
        for work in works:
            if not work.done:
                self._drop(work.request.sequence)
        return [
            Outcome(tuple(range(work.accepted)), work.token, own, logprobs=work.logprobs)
            if work.done
            else Outcome(done=False)
            for work, own in zip(works, rows, strict=True)
        ]

    def _make_room(self, missing: int, staying: set[int]) -> None:
        """Free ``missing`` blocks by evicting sequences outside the step, the least recently used first; they are never
        waited for."""
        for number in [each for each in self._held if each not in staying]:
            if self._core.free_blocks >= missing:
                return
            self._drop(number)

    def _begun(self, request: StepRequest) -> RequestProgress:
        """Give vLLM the tokens of the prefix that the sequence lacks; the sequence is then the most recently used."""
        number, prefix = request.sequence, request.prefix
        held, move, keep = self._held.get(number), Move.ANEW, 0
        if held is not None:
            move, keep = held.move(prefix, BLOCK, choosing=request.sampling is not None)
        if held is None or move is Move.ANEW:
            self._drop(number)
            held = HeldSequence(f"{number}.{next(self._names)}")
            self._core.begin(held.name, prefix, self._owners.get(number, held.name))
        elif move is Move.REWRITE:
            self._core.rewrite(held.name, keep, prefix[keep:])
        self._held.pop(number, None)
        self._held[number] = held
        return RequestProgress(request, held, done=move is Move.NOTHING)

    def _rows_wanted(self, work: RequestProgress) -> Span | None:
        start = work.request.rows_from
        if start is None or not self.row_reads or not work.done:
            return None
        table, features = self._core.table(work.held.name), self._core.features
        return Span(PagedStates(self._layers, table, features), start, len(work.processed))
