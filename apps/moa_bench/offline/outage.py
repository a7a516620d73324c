"""A link that is cut in the middle of an answer, and what becomes of texts written meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from moa_bench.conversation import draft_once, exchange
from moa_bench.loopback import LoopbackVerifier
from moa_bench.pace import Clock
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Origin, SessionEvent


class Outage:
    """A conversation at the moment its link was cut, from which any number of texts can be tried.

    Each is tried on a copy of the session. To the verifier, the next copy that reconnects is a client which
    never got the last verdict: it says once more what it has decided since the cut, and goes on behind that.

    Args:
        session: disconnected, while an answer runs and nothing is tentative.
        verifier: the other end of its conversation.
    """

    def __init__(self, session: ClientSession, verifier: LoopbackVerifier) -> None:
        self._session, self._verifier = session, verifier

    @property
    def committed(self) -> list[int]:
        """The conversation up to the cut."""
        return list(self._session.committed)

    def write(self, writer: Drafter, most: int) -> list[int]:
        """What ``writer`` writes alone: ``most`` tokens, fewer where it ends the turn or knows nothing more."""
        session, clock = copy.deepcopy(self._session), Clock()
        loop = DraftingLoop(session, writer, FixedShape(), LoopSettings(offline_limit=most, drafting="device"))
        while draft_once(loop, clock):
            pass
        return list(session.tentative)

    def reconnect(self, text: Sequence[int]) -> int:
        """How many tokens of ``text``, written since the cut, the target keeps when the link is back.

        Args:
            text: at most as long as one draft may be.
        """
        session = copy.deepcopy(self._session)
        session.extend(text, Origin.OFFLINE)
        loop, heard = DraftingLoop(session, None, FixedShape(), LoopSettings(drafting="device")), list[SessionEvent]()
        loop.listen(heard.append)  # type: ignore[arg-type]
        loop.opened()
        exchange(loop, self._verifier)  # the greeting
        while session.tentative:
            loop.next(0.0)
            exchange(loop, self._verifier)
        return sum(
            origin is Origin.OFFLINE for event in heard if isinstance(event, Committed) for origin in event.origins
        )
