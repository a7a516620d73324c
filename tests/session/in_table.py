"""Watches sessions: every call, frame and verdict leads where the tables of both ends say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from moa_runtime.session import client_states, server_states
from moa_runtime.session.client import ClientSession, LocalProtocolError
from moa_runtime.session.client_states import CALLS, Call, Heard, row_of
from moa_runtime.session.incoming import BrokenFrameError, heard_of, parse_server_message
from moa_runtime.session.server import ServerSession
from moa_runtime.wire.moa.v1 import session_pb2 as wire

_WRITTEN = {server_states.State.WRITING, server_states.State.ENDED}


class Step(NamedTuple):
    """What happened in which state, and the state behind it."""

    event: Call | Heard | server_states.Heard
    before: client_states.State | server_states.State
    after: client_states.State | server_states.State


@contextmanager
def watching() -> Iterator[set[Step]]:
    """Meanwhile no session leaves the tables; gives the steps that were seen.

    Raises:
        AssertionError: one does.
    """
    seen: set[Step] = set()
    with ExitStack() as patches:
        for call in Call:
            patches.enter_context(_patched(ClientSession, call.value, _watched_call(call, seen)))
        patches.enter_context(_patched(ClientSession, "receive", _watched_receive(seen)))
        patches.enter_context(_patched(ServerSession, "receive", _watched_server(seen)))
        patches.enter_context(_patched(ServerSession, "decide", _watched_decide))
        yield seen


_Watch = Callable[[Any, Callable[[], Any], tuple[Any, ...]], Any]


@contextmanager
def _patched(owner: type, name: str, watch: _Watch) -> Iterator[None]:
    function = getattr(owner, name)
    within = False

    @functools.wraps(function)
    def watched(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal within
        if within:  # a part of another such call
            return function(self, *args, **named)
        within = True
        try:
            return watch(self, lambda: function(self, *args, **named), args)
        finally:
            within = False

    with patch.object(owner, name, watched):
        yield


def _watched_call(call: Call, seen: set[Step]) -> _Watch:
    def watch(client: ClientSession, made: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        before, leads = client.state, CALLS[call].leads
        try:
            result = made()
        except LocalProtocolError:
            assert client.state is before, f"{call}, refused, led from {before} to {client.state}"
            raise
        assert before in leads or not CALLS[call].refusal, f"{call} was taken in {before}"
        assert client.state in leads.get(before, {before}), f"{call} led from {before} to {client.state}"
        seen.add(Step(call, before, client.state))
        return result

    return watch


def _watched_receive(seen: set[Step]) -> _Watch:
    def watch(client: ClientSession, taken: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        before, epoch = client.state, client.snapshot()["epoch"]
        result = taken()
        try:
            heard = heard_of(parse_server_message(args[0]), epoch)
        except BrokenFrameError:
            assert client.state is before
            return result
        allowed = {before, *row_of(heard, before).leads}
        assert client.state in allowed, f"{heard} led from {before} to {client.state}"
        seen.add(Step(heard, before, client.state))
        return result

    return watch


def _watched_server(seen: set[Step]) -> _Watch:
    def watch(server: ServerSession, taken: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        message: wire.ClientMessage = args[0]
        before, heard = server.state, server.heard(message)
        result = taken()
        refused = isinstance(result, wire.ServerMessage) and result.HasField("fault")
        leads = server_states.FRAMES[heard][before].leads
        expected = before if refused or leads is None else leads
        assert server.state is expected, f"{heard} led from {before} to {server.state}"
        seen.add(Step(heard, before, server.state))
        return result

    return watch


def _watched_decide(server: ServerSession, decided: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    assert server.runs
    result = decided()
    assert server.state in _WRITTEN
    return result
