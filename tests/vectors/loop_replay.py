"""Plays recorded drafting loops, to check them or to write their results anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from moa_runtime.drafters.base import GREEDY, Budget, Float32
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.events import Draft, LoopEvent, Wait
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.errors import MoaError
from moa_runtime.manifest import Fingerprints
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.options import Conditions, LoopSettings
from moa_runtime.session.client import ClientSession, LocalProtocolError
from moa_runtime.session.events import Grammar, Policy, Sampling
from moa_runtime.session.handshake import digest
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from vectors import trace_json

Said = dict[str, Any]

#: Relative tolerance of numbers: logarithms differ in their last bits from platform to platform.
TOLERANCE = 1e-9


class StandIn:
    """Replaces a drafter: records its calls. The trace contains the drafts."""

    def __init__(self, said: Said) -> None:
        self.needs_rows: bool = said["needs_rows"]
        self.stopping_rule = StoppingRule(**said["manners"]) if said["manners"] else None
        self._head_dim: int = said["head_dim"]
        self.rows = 0
        self.told: list[list[Any]] = []

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        self.told.append(["add_rows", start, len(keys)])
        if keys.shape[2] != self._head_dim:
            raise ValueError(f"rows of {keys.shape[2]} numbers, not {self._head_dim}")
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.told.append(["truncate_rows", length])
        self.rows = min(self.rows, length)

    def propose(self, prefix: object, budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        raise NotImplementedError("whoever plays the loop drafts")


class PlayedLoop:
    """The loop of a trace.

    Args:
        said: the arguments of its first step.
    """

    def __init__(self, said: Said) -> None:
        self.session = ClientSession(
            Fingerprints(**said["fingerprints"]),
            stop_tokens=said["stop_tokens"],
            policy=Policy(said["policy"]),
            row_encoding=said["row_encoding"],
            vocab_size=said["vocab_size"],
        )
        self.drafter = StandIn(said["drafter"]) if said["drafter"] else None
        self.writer = StandIn(said["writer"]) if said["writer"] else None
        settings = LoopSettings(**said["settings"])
        self.loop = DraftingLoop(self.session, self.drafter, _controller(said["controller"]), settings, self.writer)
        self._events: list[LoopEvent] = []
        self.loop.listen(self._events.append)
        self.todo: Draft | Wait | None = None

    def do(self, call: str, args: Said) -> Said:
        """Tell it something.

        Returns:
            what came of it, as a step has it.
        """
        self._events.clear()
        came: Said = {}
        try:
            result = _CALLS[call](self, **args)
            if call == "next":
                came["todo"] = self._todo(result)
            elif call == "frames_to_send":
                came["frames"] = [trace_json.up(data) for data in result]
            elif result is not None:
                came["returns"] = result
        except (LocalProtocolError, ValueError) as error:
            came["raises"] = str(error)
        if self._events:
            came["events"] = [_event(event) for event in self._events]
        for name, who in (("drafter", self.drafter), ("writer", self.writer)):
            if who is not None and who.told:
                came[name] = list(who.told)
                who.told.clear()
        came["state"] = self._state()
        return came

    def _todo(self, todo: Draft | Wait) -> Said:
        self.todo = todo
        if isinstance(todo, Wait):
            return {"wait": todo.until}
        by = "writer" if todo.by is self.writer else "drafter"
        budget, prefix = asdict(todo.budget), {"length": len(todo.prefix), "digest": digest(todo.prefix)}
        return {"draft": {"by": by, "prefix": prefix, "budget": budget, "origin": todo.origin.value}}

    def _state(self) -> Said:
        loop = self.loop
        return {
            "answering": loop.answering,
            "committed": len(loop.committed),
            "unconfirmed": trace_json.plain(loop.unconfirmed),
        }


def _controller(said: Said) -> Controller:
    if said["kind"] == "throughput":
        return CostModel(said["nodes"], said["levels"], said["width"])
    return FixedShape(
        Budget(said["nodes"], said["levels"], said["width"], branches=said["branches"]), said["lookahead"]
    )


def _event(event: LoopEvent) -> Said:
    if isinstance(getattr(event, "error", None), MoaError):
        return {"event": "Problem", "error": str(event.error), "final": event.final}  # type: ignore[union-attr]
    return trace_json.event(event)


def _ask(
    self: PlayedLoop, kept: int, tokens: list[int], seed: str, max_new_tokens: int, regex: str = "", **named: Any
) -> None:
    sampling = Sampling(seed=int(seed), grammar=Grammar("regex", regex) if regex else None)
    self.loop.ask(kept, tokens, sampling, max_new_tokens, **named)


def _drafted(self: PlayedLoop, tree: Said, seconds: float, now: float) -> None:
    assert isinstance(self.todo, Draft)
    drafted = DraftTree(*(tuple(tree[name]) for name in ("tokens", "parents", "scores", "steps")))
    self.loop.drafted(self.todo, drafted, seconds, now)


def _received(self: PlayedLoop, frame: Said, now: float) -> None:
    self.loop.received(trace_json.frame_bytes(frame, wire.ServerMessage), now)


def _setting(name: str, made: Callable[[Any], Any]) -> Callable[[PlayedLoop, Any], None]:
    return lambda self, value: setattr(self.loop, name, made(value))


_CALLS: dict[str, Callable[..., Any]] = {
    "ask": _ask,
    "cancel": lambda self: self.loop.cancel(),
    "may_keep": lambda self, start, tokens: self.loop.may_keep(start, tokens),
    "keep": lambda self, start, tokens: self.loop.keep(start, tokens),
    "connecting": lambda self: self.loop.connecting(),
    "opened": lambda self: self.loop.opened(),
    "lost": lambda self, **named: self.loop.lost(**named),
    "received": _received,
    "next": lambda self, now: self.loop.next(now),
    "drafted": _drafted,
    "frames_to_send": lambda self, now: self.loop.frames_to_send(now),
    "resend": lambda self: self.loop.resend(),
    "set_conditions": _setting("conditions", lambda value: Conditions(**value)),
    "set_policy": lambda self, value: setattr(self.session, "policy", Policy(value)),
    "set_offline": _setting("offline", lambda value: value),
}


def alike(one: object, other: object) -> bool:
    """Whether two values are the same, numbers up to :data:`TOLERANCE`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)  # type: ignore[arg-type]
    return one == other


def play_loop(steps: Sequence[Said]) -> Iterator[Said]:
    """Make the calls of a trace; yield each step with its present result, and with the state if it changed."""
    played, state = PlayedLoop(steps[0]["args"]), Said()
    yield steps[0]
    for step in steps[1:]:
        came = played.do(step["call"], step["args"])
        if came["state"] == state:
            del came["state"]
        state = came.get("state", state)
        yield {"call": step["call"], "args": step["args"]} | came


def replay_loop(name: str, steps: Sequence[Said]) -> None:
    """Play a trace; raise AssertionError with the first difference."""
    for number, (expected, got) in enumerate(zip(steps, play_loop(steps), strict=True)):
        assert alike(got, expected), f"{name}, step {number}: expected {expected}, got {got}"
