"""What writes while there is no verifier."""

from __future__ import annotations

from typing import Literal, get_args

#: ``writer``: the bundle's whole model, or the drafter where it has none. ``off``: nothing, the answer waits.
Offline = Literal["writer", "drafter", "off"]
OFFLINES: tuple[Offline, ...] = get_args(Offline)
