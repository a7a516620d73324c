"""Who is to draft, as a user asks for it. Light, so that a command line can say it at once."""

from __future__ import annotations

from typing import Literal

#: ``auto`` is whoever is expected to bring more tokens a second, see :class:`drafter_selection.Placement`.
Drafting = Literal["auto", "device", "server"]
DRAFTINGS: tuple[Drafting, ...] = ("auto", "device", "server")
