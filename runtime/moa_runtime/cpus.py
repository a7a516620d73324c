"""Processors that this process may use."""

from __future__ import annotations

import os


def available_cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_many_threads(threads: int | None) -> str | None:
    """What to warn of where more threads are to compute than this process has processors; None where nothing is wrong.

    Args:
        threads: None for no choice.
    """
    available = available_cpus()
    if threads is None or threads <= available:
        return None
    processors = "1 processor" if available == 1 else f"{available} processors"
    return (
        f"{threads} threads on the {processors} that this process may use wait for each other: "
        f"--threads {available} is quicker"
    )
