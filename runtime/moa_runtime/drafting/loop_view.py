"""What an application may know of a drafting loop, and set in it."""

from __future__ import annotations

from collections.abc import Callable

from moa_runtime.drafting.draft_policy import Decisions
from moa_runtime.drafting.events import LoopEvent
from moa_runtime.drafting.listeners import Listeners
from moa_runtime.drafting.offline import Offline
from moa_runtime.drafting.settings import Conditions
from moa_runtime.events import LinkChanged
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Origin, Policy


class LoopView:
    """At any time, without disturbing it. :class:`~moa_runtime.drafting.loop.DraftingLoop` is the class to use."""

    def __init__(self, session: ClientSession, decisions: Decisions) -> None:
        self._session, self._decisions = session, decisions
        self._listeners = Listeners()

    def listen(self, listener: Callable[[LoopEvent], None]) -> None:
        """Have ``listener`` called with each event."""
        self._listeners.add(listener)

    @property
    def link(self) -> LinkChanged:
        """Its last change."""
        return self._listeners.link

    @property
    def committed(self) -> list[int]:
        """Tokens that the target has confirmed."""
        return self._session.committed

    @property
    def unconfirmed(self) -> tuple[tuple[int, Origin], ...]:
        """Answer tokens behind these, with their origins."""
        return self._session.unconfirmed

    @property
    def answering(self) -> bool:
        return self._session.answering

    @property
    def conditions(self) -> Conditions:
        """What the host says; may be set at any time. Whether rows are wanted is told with the next connection."""
        return self._decisions.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._decisions.conditions = conditions
        self._session.wants_rows = not conditions.metered
        self._session.held = conditions.background

    @property
    def policy(self) -> Policy:
        """What becomes of text written offline; may be set at any time."""
        return self._session.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._session.policy = policy

    @property
    def offline(self) -> Offline:
        """What writes while there is no verifier; may be set at any time."""
        return self._decisions.offline

    @offline.setter
    def offline(self, offline: Offline) -> None:
        self._decisions.offline = offline
