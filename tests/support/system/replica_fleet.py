"""Two replicas behind a proxy, as the tests see them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from moa_runtime.transport import Endpoint

REPLICAS = 2
_LONGEST_CHANGE_S = 300.0
_POLL_S = 0.1


class Fleet(Protocol):
    """Two replicas and their proxy. Every call blocks."""

    endpoint: Endpoint

    def drain(self) -> None:
        """Tell one replica to end, as an operator or an autoscaler would, and wait until it is gone."""

    def kill(self) -> None:
        """Kill the replica that was not drained, and wait until the proxy has noticed."""

    def replace(self) -> None:
        """Start a replica in the place of the one that is gone, and wait until the proxy has noticed."""


def wait_for(problem: str, happened: Callable[[], bool]) -> None:
    """Poll until ``happened`` is true, for 300 s at most."""
    give_up = time.monotonic() + _LONGEST_CHANGE_S
    while not happened():
        assert time.monotonic() < give_up, f"after {_LONGEST_CHANGE_S:g} s {problem}"
        time.sleep(_POLL_S)
