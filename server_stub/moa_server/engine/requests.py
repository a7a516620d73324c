"""Requests of a step, before an engine works on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moa_runtime.session.tree import chain
from moa_server.engine.base import StepRequest


def check_request(request: StepRequest, *, has_drafter: bool) -> None:
    """Raises ValueError: a request without a prefix, a draft where nothing is chosen, or rows without a drafter."""
    if not request.prefix:
        raise ValueError("a request needs at least one token of prefix")
    if request.sampling is None and request.draft:
        raise ValueError("a draft was given, and no sampling to verify it with")
    if request.rows_from is not None and not has_drafter:
        raise ValueError("memory rows were asked of an engine without a drafter")


def check_chain(request: StepRequest, most_drafted: int, max_context: int) -> None:
    """Raises ValueError: a tree, or more tokens than a draft or a context has."""
    drafted, tokens = len(request.draft), len(request.prefix) + len(request.draft)
    if request.parents and list(request.parents) != chain(drafted):
        raise ValueError("this engine verifies chains only, and the draft is a tree")
    if drafted > most_drafted or tokens > max_context:
        most = f"a context has {max_context}, a draft {most_drafted}"
        raise ValueError(f"{tokens} tokens, {drafted} of them drafted, are too many: {most}")


def grouped(requests: Sequence[StepRequest], need: Callable[[StepRequest], int], room: int) -> list[list[StepRequest]]:
    """Requests that fit into a cache together; one group, but for a crowded cache. Each of them fits alone.

    Args:
        need: what the sequence of a request takes of ``room``.
    """
    groups: list[list[StepRequest]] = []
    free = 0
    for request in requests:
        if not groups or need(request) > free:
            groups.append([])
            free = room
        groups[-1].append(request)
        free -= need(request)
    return groups
