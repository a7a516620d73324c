"""Who is told what happens in the drafting loop, and how the link stands."""

from __future__ import annotations

from collections.abc import Callable

from moa_runtime.drafting.events import LoopEvent
from moa_runtime.events import LinkChanged, LinkStatus


class Listeners:
    """Told at once, in the order in which they came.

    Attributes:
        link: its last change.
    """

    def __init__(self) -> None:
        self.link = LinkChanged(LinkStatus.OFFLINE)
        self._all: list[Callable[[LoopEvent], None]] = []

    def add(self, listener: Callable[[LoopEvent], None]) -> None:
        """Have it called with each event."""
        self._all.append(listener)

    def tell(self, *events: LoopEvent) -> None:
        """Something happened."""
        for event in events:
            for listener in self._all:
                listener(event)

    def set_link(self, status: LinkStatus, detail: str = "", retry_in_s: float | None = None) -> None:
        """The link stands so; told where that is news."""
        changed = LinkChanged(status, detail, retry_in_s)
        if changed != self.link:
            self.link = changed
            self.tell(changed)
