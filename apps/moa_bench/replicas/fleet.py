"""Replicas behind a proxy, as the benchmark sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from moa_runtime.errors import MoaError
from moa_runtime.transport import Endpoint

_LONGEST_CHANGE_S = 300.0
_LOOK_EVERY_S = 0.1


class Fleet(Protocol):
    """Two of them. Every call blocks.

    Attributes:
        endpoint: the proxy's.
    """

    endpoint: Endpoint

    def drain(self) -> None:
        """One replica is told to end, as an operator or an autoscaler would; wait until it is gone."""

    def kill(self) -> None:
        """The one that was not drained dies without a word; wait until the proxy knows."""

    def replace(self) -> None:
        """Have another one in the place of that which is gone; wait until the proxy knows."""


def wait_for(what: str, happened: Callable[[], bool]) -> None:
    """Look until something has happened.

    Args:
        what: a clause for the error.

    Raises:
        MoaError: it took too long.
    """
    give_up = time.monotonic() + _LONGEST_CHANGE_S
    while not happened():
        if time.monotonic() > give_up:
            raise MoaError(f"after {_LONGEST_CHANGE_S:g} s {what}")
        time.sleep(_LOOK_EVERY_S)
