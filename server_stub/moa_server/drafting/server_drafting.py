"""The verifier's own drafts: copies for every conversation, and those of its model if they pay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafters.moa import MoaDrafter, Steps
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.tree import DraftTree
from moa_runtime.tokens import common_length
from moa_server.drafting.batched_backend import BatchedBackend, draft_together
from moa_server.drafting.drafting_cost import (
    LEVELS,
    SPREAD,
    DraftingCost,
    drafts_that_pay,
)
from moa_server.drafting.own_draft import NOTHING, OwnDraft, copied
from moa_server.engine.base import Rows
from moa_server.logging import log_unexpected
from moa_server.scheduling.step_cost import Float64, StepSeconds

#: Seconds without a draft after which a conversation may be evicted for another. With less, active conversations would
#: evict each other and recompute their memory rows in turns.
_IDLE_S = 2.0
#: Drafts that a conversation remembers; what is expected of the first one, by level.
_REMEMBERED, _FIRST = 16, 0.7
#: Steps in a row without the model's drafts after which a conversation asks for no more memory rows. After as many
#: without any, the model is considered in one step of this many, and in steps of fewer conversations.
_PATIENCE = 8
#: Share of the time that drafts may take that are made to see whether they pay, and their levels.
_TRIALS, _TRIAL_LEVELS = 0.005, 2
#: A draft whose conversations had more tokens to read than this tells nothing of later ones' seconds.
_FEW_READ = 16
#: Most tokens of a tree, and nodes that each of its steps continues (EAGLE-2, arXiv 2406.16858, section 5); tokens that
#: cost less than this are drafted as trees.
_NODES, _WIDTH, _CHEAP = 62, 10, 0.2
#: Weight of what the drafter claims beside what came true, tokens, and the weight that these keep after a verdict.
_TRUST, _MEMORY = 4.0, 0.98

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """A conversation of the coming step.

    Attributes:
        sequence: the engine's number of it.
        prefix: its committed tokens.
        room: most tokens that the answer may still get; None for no limit.
        paths: probabilities of the path to each token of the draft that it has now.
    """

    sequence: int
    prefix: Sequence[int]
    sampling: Sampling
    room: int | None = None
    paths: Sequence[float] = ()


class _Conversation:
    """A drafter's state. The drafter belongs to the drafting thread, the rest to the event loop's.

    Attributes:
        mixture: of the drafter, whose text is copied; the drafting thread uses it while :meth:`ServerDrafting.prepare`
            runs.
        drafter: None without a model, or once it has failed.
        text: tokens whose memory rows the drafter has, or will have once it has done what is ``pending``.
        made: the last draft of the model, and the number of tokens before it.
        paths: claimed probabilities of the likeliest path in the last drafts, ``[_REMEMBERED, LEVELS]``.
        claimed, right: tested tokens, as claimed and as it came; older ones count less.
        read: number of tokens before the last draft of the model, which it has read.
        unused: steps in a row without a draft of the model; -1 before the first one.
    """

    def __init__(self, mixture: NgramMixture, drafter: MoaDrafter | None, known: _Conversation | None) -> None:
        self.mixture, self.drafter = mixture, drafter
        self.text: list[int] = []
        self.pending: list[Callable[[MoaDrafter], None]] = []
        self.made: tuple[int, OwnDraft] = (0, NOTHING)
        self.read = 0
        first = np.tile(_FIRST ** np.arange(1, LEVELS + 1), (_REMEMBERED, 1))
        self.paths: Float64 = first if known is None else known.paths.copy()
        self.claimed: float = _TRUST if known is None else known.claimed
        self.right: float = _TRUST if known is None else known.right
        self.unused = -1
        self.last_used = 0.0

    @property
    def expected(self) -> Float64:
        """Probabilities of the path to each level in drafts like the next one, ``[_REMEMBERED, LEVELS]``."""
        return self.paths * (self.right / self.claimed) ** np.arange(1, LEVELS + 1)

    def cut(self, text: Sequence[int]) -> int:
        """Drop the rows that do not match the beginning of ``text``; return the number left."""
        agreed = common_length(self.text, text)
        if agreed < len(self.text):
            del self.text[agreed:]
            self.pending.append(lambda drafter: drafter.truncate_rows(agreed))
        return agreed

    def steps(self, one: Round, budget: Budget) -> Steps[DraftTree]:
        """Return the work of a draft, which is the drafting thread's."""
        drafter, pending, self.pending = self.drafter, self.pending, []

        def draft() -> Steps[DraftTree]:
            assert drafter is not None
            for change in pending:
                change(drafter)
            return (yield from drafter.steps(one.prefix, budget, one.sampling))

        return draft()

    def remember(self, tree: DraftTree) -> None:
        """Remember the likeliest path of a draft; levels after its end are taken to be like its mean one."""
        scores = tree.likeliest_scores()[:LEVELS]
        if scores:
            after = [scores[-1] / len(scores) * level for level in range(len(scores) + 1, LEVELS + 1)]
            self.paths = np.roll(self.paths, 1, axis=0)
            self.paths[0] = np.exp([*scores, *after])


class ServerDrafting:
    """Drafts of all conversations, which are named by the engine's sequence numbers. In a round :meth:`rows_from` comes
    first, then :meth:`offered`, perhaps :meth:`prepare` and :meth:`offered` again, and after the verdict :meth:`learn`
    and :meth:`add_rows`.

    All methods belong to the event loop's thread. A conversation's state is made on first use and can be made again at
    any time: it then requests memory rows from the first one on. If a drafter fails, the error is logged and its
    conversation continues with copies.

    Args:
        backend: runs the drafter's device half; None drafts only n-gram copies of the conversation.
        limits: those of the Welcome.
        stop_tokens: ids that end a turn.
        most: conversations with a state. If full, the least recently used one is evicted if idle; otherwise the new
            one gets no drafts for now.
        clock: seconds, monotonic.

    Attributes:
        cost: of the model's drafts.
    """

    def __init__(
        self,
        backend: BatchedBackend | None,
        limits: Limits,
        stop_tokens: Sequence[int],
        *,
        most: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = DraftingCost()
        self._backend, self._limits, self._stop_tokens = backend, limits, tuple(stop_tokens)
        self._most, self._clock = most, clock
        self._known: _Conversation | None = None  # whose draft was verified last
        self._conversations: dict[int, _Conversation] = {}  # the least recently used first
        self._vain = 0  # steps in a row without drafts of the model
        self._rounds = 0  # conversations of the last step for which they were considered
        self._tried_at, self._trying = clock(), False  # the last trial or draft; whether rows for a trial are coming
        self._thread = ThreadPoolExecutor(1, "drafts")  # libraries keep threads and code for each that calls them

    def __len__(self) -> int:
        """Number of conversations with a state."""
        return len(self._conversations)

    def rows_from(self, sequence: int, prefix: Sequence[int]) -> int | None:
        """Drop rows that do not match ``prefix``; return the position of the first one that the drafter lacks, None if
        it takes none or its steps do not pay at present."""
        conversation = self._opened(sequence)
        if conversation is None or conversation.drafter is None:
            return None
        held = conversation.cut(prefix)
        early = conversation.unused < 0 and len(prefix) - held > SPREAD  # a long prompt: they may not pay
        return held if conversation.unused < _PATIENCE and not early else None

    def add_rows(self, sequence: int, text: Sequence[int], rows: Rows | None) -> None:
        """Give memory rows to the conversation's drafter. Known ones are skipped, and all if earlier ones are missing;
        those are requested again. ``text`` has the tokens from position 0 to ``rows.stop`` at least."""
        conversation = self._conversations.get(sequence)
        if rows is None or conversation is None or conversation.drafter is None:
            return
        held = conversation.cut(text)
        if not rows.start <= held < rows.stop:
            return
        keys, values = (half[held - rows.start :] for half in (rows.keys, rows.values))
        conversation.text += text[held : rows.stop]
        conversation.pending.append(lambda drafter: drafter.add_rows(held, keys, values))

    def offered(self, sequence: int, prefix: Sequence[int], sampling: Sampling, room: int | None = None) -> OwnDraft:
        """Return the best draft after ``prefix``, the committed tokens, that takes no step of the model: copies, or the
        rest of the model's last draft. Empty if there is nothing to draft.

        Args:
            room: most tokens that the answer may still get; None for no limit.
        """
        conversation, depth = self._opened(sequence), self._depth(prefix, room)
        if conversation is None or depth < 1:
            return NOTHING
        base, made = conversation.made
        left = made.after(prefix[base:]) if made.tokens and base <= len(prefix) else NOTHING
        if not left.tokens:
            conversation.made = (0, NOTHING)
        conversation.mixture.confirm(prefix)
        copies = copied(conversation.mixture, prefix, sampling, depth, branches=self._limits.trees)
        return max(left.cut(depth), copies, key=lambda draft: sum(draft.paths)) if left.tokens else copies

    async def prepare(
        self, rounds: Sequence[Round], seconds: StepSeconds, row_s: float = 0.0, least_gain: float = 1.0
    ) -> bool:
        """Let the model draft, in a thread, for those conversations of the coming step for which that pays;
        :meth:`offered` has the result. Return whether there is any. The caller may be cancelled.

        Args:
            seconds: of the step.
            row_s: seconds that a memory row takes.
            least_gain: as of :func:`~moa_server.drafting.drafting_cost.drafts_that_pay`.
        """
        conversations = [self._able(each) for each in rounds]
        able = [index for index, each in enumerate(conversations) if each is not None]
        if self._backend is None or not able:
            return False
        began = self._clock()
        paying = None
        lacking = [
            0 if one is None else max(0, len(each.prefix) - 1 - len(one.text))
            for each, one in zip(rounds, conversations, strict=True)
        ]
        if self._considers(len(rounds)):
            paths = [np.empty((0, LEVELS)) if each is None else each.expected for each in conversations]
            known = [each.paths for each in rounds]
            paying = drafts_that_pay(paths, known, self.cost, seconds, row_s, least_gain, lacking)
        chosen, levels = ((), 0) if paying is None else (paying.chosen, paying.levels)
        self._vain = 0 if chosen else self._vain + 1
        for index in able:
            conversation = conversations[index]
            assert conversation is not None
            # Rows of a crowd cost more than a draft that waits for them, and those of a prompt are not made in advance.
            more = _PATIENCE if lacking[index] > SPREAD else 1 if len(rounds) == 1 else _PATIENCE // 2
            conversation.unused = 0 if index in chosen else max(0, conversation.unused) + more
        if paying is None:
            return False
        self._rounds = len(rounds)
        if not chosen and (tried := self._trial(rounds, conversations, row_s)) is not None:
            chosen, levels = [tried], _TRIAL_LEVELS
        found = [(rounds[index], one) for index in chosen if (one := conversations[index]) is not None]
        ready = [(each, one) for each, one in found if one.cut(each.prefix) >= len(each.prefix) - 1]
        if not ready:  # their rows come with this round's verdicts
            return False
        step_s = float(self.cost.seconds(1, len(ready)))
        # Half, for the choice for the whole step follows.
        prices = Prices(step=paying.rate * step_s / len(ready), node=paying.price / 2)
        branches = paying.price < _CHEAP and self._limits.trees
        self._trying = False
        trees = await self._drafted(self._backend, ready, levels, prices, branches=branches)
        self._tried_at = self._clock()
        if all(len(each.prefix) - conversation.read <= _FEW_READ for each, conversation in ready):
            self.cost.observe(levels, len(ready), max(1e-6, self._tried_at - began))
        for (each, conversation), tree in zip(ready, trees, strict=True):
            conversation.read = len(each.prefix)
            if isinstance(tree, DraftTree):
                conversation.made = len(each.prefix), OwnDraft.of(tree)
                conversation.remember(tree)
            else:
                log_unexpected(_log, "the drafter", tree)
                conversation.drafter, conversation.text, conversation.pending = None, [], []
        return True

    def _considers(self, rounds: int) -> bool:
        """Whether drafts of the model are considered for a step of ``rounds`` conversations."""
        return self._vain % _PATIENCE == 0 or self._vain < _PATIENCE or self._trying or rounds < self._rounds

    def _trial(
        self, rounds: Sequence[Round], conversations: Sequence[_Conversation | None], row_s: float
    ) -> int | None:
        """Return the conversation to draft for as a trial, that with the fewest tokens without memory rows, which it
        then asks for; None if it is too early."""
        lacking = {
            index: len(each.prefix) - len(one.text)
            for index, (each, one) in enumerate(zip(rounds, conversations, strict=True))
            if one is not None
        }
        tried = min(lacking, key=lacking.__getitem__)
        conversation, trial_s = conversations[tried], float(self.cost.seconds(_TRIAL_LEVELS, 1))
        if (self._clock() - self._tried_at) * _TRIALS < trial_s + row_s * lacking[tried]:
            return None
        assert conversation is not None
        if lacking[tried] > 1:
            conversation.unused, self._trying = _PATIENCE - 1, True
        return tried

    def learn(self, sequence: int, draft: OwnDraft, verified: Collection[int], path: Sequence[int]) -> None:
        """Learn from a verdict how far the model's claims are true.

        Args:
            verified, path: indices of the draft's verified tokens, and of the accepted ones.
        """
        conversation = self._conversations.get(sequence)
        if conversation is None or not draft.modelled:
            return
        roots, accepted = {0, *(index + 1 for index in path)}, set(path)
        tested = [index for index in verified if draft.parents[index] in roots]
        conversation.claimed *= _MEMORY
        conversation.right *= _MEMORY
        conversation.claimed += sum(draft.probabilities[index] for index in tested)
        conversation.right += sum(index in accepted for index in tested)
        self._known = conversation

    def release(self, sequence: int) -> None:
        """Forget a conversation."""
        self._conversations.pop(sequence, None)

    def close(self) -> None:
        """Wait for the drafts under way and free everything; no call may follow."""
        self._thread.shutdown(cancel_futures=True)
        self._conversations.clear()

    def _depth(self, prefix: Sequence[int], room: int | None) -> int:
        """Return the most tokens of a path; the target's own choice follows every draft."""
        left = self._limits.max_context - len(prefix)
        return min(left if room is None else min(room, left), self._limits.max_draft_tokens + 1) - 1

    def _able(self, one: Round) -> _Conversation | None:
        """Return the conversation of a round if the model can draft for it."""
        conversation = self._conversations.get(one.sequence)
        able = conversation is not None and conversation.drafter is not None and self._depth(one.prefix, one.room) > 0
        return conversation if able else None

    async def _drafted(
        self,
        backend: BatchedBackend,
        ready: Sequence[tuple[Round, _Conversation]],
        levels: int,
        prices: Prices,
        *,
        branches: bool,
    ) -> list[DraftTree | Exception]:
        work = []
        for each, conversation in ready:
            depth = self._depth(each.prefix, each.room)
            budget = Budget(min(_NODES, self._limits.max_draft_tokens), levels, _WIDTH, branches, depth, prices)
            work.append(conversation.steps(each, budget))
        return await asyncio.get_running_loop().run_in_executor(self._thread, draft_together, backend, work)

    def _opened(self, sequence: int) -> _Conversation | None:
        """Return the conversation, now the most recently used; None if there is no space for it."""
        conversation, now = self._conversations.pop(sequence, None), self._clock()
        if conversation is None:
            if len(self._conversations) >= self._most:
                number, oldest = next(iter(self._conversations.items()))
                if now - oldest.last_used < _IDLE_S:
                    return None
                self.release(number)
            mixture = NgramMixture(self._stop_tokens)
            conversation = _Conversation(mixture, self._new_drafter(mixture), self._known)
            if self._vain or self._rounds > 1:  # among others, no rows are made for it before a step is considered
                conversation.unused = _PATIENCE
        conversation.last_used = now
        self._conversations[sequence] = conversation
        return conversation

    def _new_drafter(self, mixture: NgramMixture) -> MoaDrafter | None:
        if self._backend is None:
            return None
        context, stop_tokens = self._limits.max_context, self._stop_tokens
        return MoaDrafter(self._backend, max_context=context, stop_tokens=stop_tokens, mixture=mixture)
