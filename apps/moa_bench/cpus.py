"""Keeping client and verifier apart on one machine, so that neither slows the other."""

from __future__ import annotations

import os


def split_cpus() -> tuple[set[int], set[int]] | None:
    """Processors for the client (and the link) and for the verifier; None where they cannot be told apart.

    The verifier gets the upper half, at least one.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        return None
    half = len(own) // 2
    return set(own[:half]), set(own[half:])


def pin(pid: int, cpus: set[int]) -> None:
    """Bind a process to processors: its main thread, and the threads it starts from now on.

    Args:
        pid: 0 for the caller.
    """
    os.sched_setaffinity(pid, cpus)
