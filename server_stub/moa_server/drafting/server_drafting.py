"""Server-side drafting: a drafter and a cost model for each conversation, as on a device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramDrafter, NgramMixture
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_policy import clip_budget
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.options import Conditions
from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.tree import DraftTree
from moa_runtime.tokens import common_length
from moa_server.drafting.batcher import BatchedBackend
from moa_server.engine.base import Rows
from moa_server.logging import log_unexpected

#: Drafts made at once, and the largest batch of steps.
_THREADS = 32
#: Seconds without a draft after which a conversation may be evicted for another. With less, active conversations would
#: evict each other and recompute their memory rows in turns.
_IDLE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A draft, and its duration in seconds."""

    tree: DraftTree
    seconds: float = 0.0


#: The empty draft.
NOTHING = Proposal(DraftTree())


class _Conversation:
    """A drafter's state. The drafter belongs to one thread at a time, the rest to the event loop's.

    Attributes:
        drafter: None once it has failed.
        text: tokens whose memory rows the drafter has, or will have once it has done what is ``pending``.
        under_way: the draft being made, even if its result is no longer wanted.
    """

    def __init__(self, drafter: Drafter, controller: CostModel) -> None:
        self.drafter: Drafter | None = drafter
        self.controller = controller
        self.text: list[int] = []
        self.pending: list[Callable[[Drafter], None]] = []
        self.under_way: asyncio.Future[DraftTree] | None = None
        self.last_used = 0.0

    def cut(self, text: Sequence[int]) -> int:
        """Drop the rows that do not match the beginning of ``text``; return the number left."""
        agreed = common_length(self.text, text)
        if agreed < len(self.text):
            del self.text[agreed:]
            self.pending.append(lambda drafter: drafter.truncate_rows(agreed))
        return agreed


class ServerDrafting:
    """Drafts of all conversations, which are named by the engine's sequence numbers. In a round :meth:`rows_from` comes
    first, then :meth:`propose`, and after the verdict :meth:`observe` and :meth:`add_rows`.

    All methods belong to the event loop's thread. A conversation's state is made on first use and can be made again at
    any time: it then requests memory rows from the first one on. If a drafter fails, the error is logged and its
    conversation continues without drafts.

    Args:
        backend: runs the drafter's device half; None drafts only n-gram copies of the conversation.
        limits: those of the Welcome.
        stop_tokens: ids that end a turn.
        most: conversations with a state. If full, the least recently used one is evicted if idle; otherwise the new
            one gets no drafts for now.
        clock: seconds, monotonic.
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
        self._backend, self._limits, self._stop_tokens = backend, limits, tuple(stop_tokens)
        self._most, self._clock = most, clock
        self._known = CostModel()  # of the verdict that came last
        self._conversations: dict[int, _Conversation] = {}  # the least recently used first
        self._threads = ThreadPoolExecutor(min(_THREADS, most), "drafts")

    def __len__(self) -> int:
        """Number of conversations with a state."""
        return len(self._conversations)

    def rows_from(self, sequence: int, prefix: Sequence[int]) -> int | None:
        """Drop rows that do not match ``prefix``; return the position of the first one that the drafter lacks, None if
        it takes none or its steps do not pay at present."""
        conversation = self._opened(sequence)
        if conversation is None or conversation.drafter is None or self._backend is None:
            return None
        held = conversation.cut(prefix)
        return held if conversation.controller.budget().levels else None

    def add_rows(self, sequence: int, text: Sequence[int], rows: Rows | None) -> None:
        """Give memory rows to the conversation's drafter. Known ones are skipped, and all if earlier ones are missing;
        those are requested again. ``text`` has the tokens from position 0 to ``rows.stop`` at least."""
        conversation = self._conversations.get(sequence)
        if rows is None or conversation is None or conversation.drafter is None or self._backend is None:
            return
        held = conversation.cut(text)
        if not rows.start <= held < rows.stop:
            return
        keys, values = (half[held - rows.start :] for half in (rows.keys, rows.values))
        conversation.text += text[held : rows.stop]
        conversation.pending.append(lambda drafter: drafter.add_rows(held, keys, values))

    async def propose(
        self, sequence: int, prefix: Sequence[int], sampling: Sampling, *, room: int | None = None
    ) -> Proposal:
        """Draft, in a thread, as many tokens after ``prefix``, the committed tokens, as pay off. Empty if there is
        nothing to draft. The caller may be cancelled.

        Args:
            room: most tokens that the answer may still get; None for no limit.
        """
        conversation = self._opened(sequence)
        while conversation is not None and conversation.under_way is not None:  # a draft of a cancelled caller
            await asyncio.wait({conversation.under_way})
        if conversation is None or conversation.drafter is None:
            return NOTHING
        # The target's own choice follows every draft.
        left = self._limits.max_context - len(prefix)
        room = (left if room is None else min(room, left)) - 1
        if room < 1:
            return NOTHING
        rows = conversation.cut(prefix)
        budget = clip_budget(conversation.controller.budget(), self._limits, room, Conditions())
        if conversation.drafter.needs_rows and rows < len(prefix) - 1:  # they come with this round's verdict
            budget = replace(budget, levels=0)
        began = self._clock()
        pending, conversation.pending = conversation.pending, []
        text, drafter, backend = list(prefix), conversation.drafter, self._backend

        def draft() -> DraftTree:
            with contextlib.nullcontext() if backend is None else backend.drafting():
                for change in pending:
                    change(drafter)
                return drafter.propose(text, budget, sampling)

        conversation.under_way = drafting = asyncio.get_running_loop().run_in_executor(self._threads, draft)
        drafting.add_done_callback(lambda _: self._ended(conversation, drafting))
        await asyncio.wait({drafting})  # which cancels nothing
        if drafting.cancelled() or drafting.exception() is not None:
            return NOTHING
        return Proposal(drafting.result(), self._clock() - began)

    def observe(
        self,
        sequence: int,
        proposal: Proposal,
        accepted: int,
        *,
        waited_s: float,
        compute_s: float = 0.0,
        supplied: int = 0,
    ) -> None:
        """Learn the costs and benefits of drafts from a verdict, see :class:`moa_runtime.drafting.events.RoundEnded`.

        Args:
            proposal: the verified draft; may be empty.
            accepted: number of its accepted tokens.
            waited_s: seconds that the job took, queueing included; ``compute_s`` of them those of its steps.
            supplied: prompt tokens of the job.
        """
        conversation = self._conversations.get(sequence)
        if conversation is None:
            return
        tree, self._known = proposal.tree, conversation.controller
        drafted, draft_s = len(tree.tokens), proposal.seconds
        self._known.observe(
            RoundEnded(supplied, drafted, tree.depth, accepted, tree.steps, draft_s, waited_s, compute_s)
        )

    def release(self, sequence: int) -> None:
        """Forget a conversation."""
        self._conversations.pop(sequence, None)

    def close(self) -> None:
        """Wait for the drafts under way and free everything; no call may follow."""
        self._threads.shutdown(cancel_futures=True)
        self._conversations.clear()
        if self._backend is not None:
            self._backend.close()

    def _opened(self, sequence: int) -> _Conversation | None:
        """Return the conversation, now the most recently used; None if there is no space for it."""
        conversation, now = self._conversations.pop(sequence, None), self._clock()
        if conversation is None:
            if len(self._conversations) >= self._most:
                number, oldest = next(iter(self._conversations.items()))
                if now - oldest.last_used < _IDLE_S:
                    return None
                self.release(number)
            conversation = _Conversation(self._new_drafter(), self._known.sibling())
        conversation.last_used = now
        self._conversations[sequence] = conversation
        return conversation

    def _new_drafter(self) -> Drafter:
        stop_tokens, context = self._stop_tokens, self._limits.max_context
        if self._backend is None:
            return NgramDrafter(stop_tokens)
        mixture = NgramMixture(stop_tokens)
        return MoaDrafter(self._backend, max_context=context, stop_tokens=stop_tokens, mixture=mixture)

    def _ended(self, conversation: _Conversation, drafting: asyncio.Future[DraftTree]) -> None:
        conversation.under_way = None
        if drafting.cancelled():  # the verifier ends
            return
        error = drafting.exception()
        if error is not None:
            log_unexpected(_log, "the drafter", error)
            conversation.drafter, conversation.text, conversation.pending = None, [], []
