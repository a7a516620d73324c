"""Records client sessions: calls, frames, events, and the state after each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moa_runtime.session.client import ClientSession, LocalProtocolError
from moa_runtime.session.snapshot import SnapshotError
from vectors import trace_json

Step = dict[str, Any]

CALLS = (
    "connect",
    "disconnected",
    "prompt",
    "continue_answer",
    "extend",
    "declare_offline",
    "propose",
    "grant_credit",
    "revoke_credit",
    "resend",
    "resume",
    "cancel",
    "rewind",
    "keep",
    "snapshot",
    "receive",
    "frames_to_send",
    "note_round_trip",
)
SETTINGS = ("policy", "held", "wants_rows", "rows")
#: Calls that return events.
TELLING = ("resume", "cancel", "keep", "receive")
#: Part of the state beside what a snapshot holds.
LIVE = (
    "link",
    "rows",
    "held",
    "wants_rows",
    "credit",
    "credit_open",
    "server_may_push",
    "awaiting_verdict",
    "awaiting_prefill",
    "may_propose",
    "may_grant_credit",
    "rows_coming",
    "stamp",
    "room",
    "tentative_finish",
    "max_new_tokens",
    "unconfirmed",
)


@dataclass
class Trace:
    """One client session from its beginning on."""

    name: str
    steps: list[Step] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def add(self, step: Step, client: ClientSession | None) -> None:
        """Append a step with its changes of the client's state. Frames that are taken belong to the step before."""
        if step.get("call") == "frames_to_send" and ("frames" not in self.steps[-1] or not step["frames"]):
            self.steps[-1].setdefault("frames", step["frames"])
            return
        now = {} if client is None else state_of(client)
        changed = {key: value for key, value in now.items() if key not in self.state or self.state[key] != value}
        self.steps.append(step | ({"state": changed} if changed else {}))
        self.state = now


def state_of(client: ClientSession) -> dict[str, Any]:
    """Return the public state of a session without its fingerprints."""
    said = {key: value for key, value in client.snapshot().items() if key not in ("version", "fingerprints")}
    return trace_json.plain(said | {name: getattr(client, name) for name in LIVE})  # type: ignore[no-any-return]


def outcome(name: str, result: object) -> dict[str, Any]:
    """Return the result of a call as the fields of a step."""
    if result is None or (name in TELLING and not result):
        return {}
    if name in TELLING:
        return {"events": [trace_json.event(event) for event in result]}  # type: ignore[attr-defined]
    if name == "frames_to_send":
        return {"frames": [trace_json.up(data) for data in result]}  # type: ignore[attr-defined]
    return {"returns": trace_json.plain(result)}


def raised(error: Exception) -> dict[str, Any]:
    """Return an error as the fields of a step; without text for snapshots, as it shows Python values."""
    said = {"error": type(error).__name__}
    return {"raises": said if isinstance(error, SnapshotError) else said | {"text": str(error)}}


class Recorder:
    """The traces of one run.

    Attributes:
        name: of what happens now; a trace has it, and which of its sessions it is.
    """

    def __init__(self) -> None:
        self.name = ""
        self.traces: list[Trace] = []
        self._busy = False  # within a call: what it calls itself is part of it
        self._of: dict[int, tuple[ClientSession, Trace]] = {}  # the session is held, so that its id stays its own

    def begin(self) -> Trace:
        count = sum(trace.name.rpartition(" / ")[0] == self.name for trace in self.traces)
        self.traces.append(Trace(f"{self.name} / {count + 1}"))
        return self.traces[-1]

    def made(self, client: ClientSession, step: Step) -> None:
        """A session begins."""
        trace = self.begin()
        self._of[id(client)] = client, trace
        self._note(trace, step, client)

    def refused(self, step: Step) -> None:
        """A session could not be restored."""
        self.begin().add(step, None)

    def did(self, client: ClientSession, step: Step) -> None:
        if id(client) in self._of:
            self._note(self._of[id(client)][1], step, client)

    def _note(self, trace: Trace, step: Step, client: ClientSession) -> None:
        with self.inside():
            trace.add(step, client)

    @contextmanager
    def inside(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    @property
    def busy(self) -> bool:
        return self._busy


def plain_arguments(function: Callable[..., Any], *args: Any, **named: Any) -> dict[str, Any]:
    """Return all arguments by name, including defaults."""
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    return {
        name: trace_json.down(value) if isinstance(value, bytes) else trace_json.plain(value)
        for name, value in bound.arguments.items()
        if name not in ("self", "cls")
    }


def _recorded(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: ClientSession, *args: Any, **named: Any) -> Any:
        if recorder.busy:
            return function(self, *args, **named)
        step: Step = {"call": name}
        said = plain_arguments(function, self, *args, **named)
        if said:
            step["args"] = said
        try:
            with recorder.inside():
                result = function(self, *args, **named)
        except LocalProtocolError as error:
            recorder.did(self, step | raised(error))
            raise
        recorder.did(self, step | outcome(name, result))
        return result

    return call


def _recorded_create(recorder: Recorder, function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def create(self: ClientSession, *args: Any, **named: Any) -> None:
        if recorder.busy:
            return function(self, *args, **named)
        with recorder.inside():
            function(self, *args, **named)
        recorder.made(self, {"call": "create", "args": plain_arguments(function, self, *args, **named)})
        return None

    return create


def _recorded_restore(recorder: Recorder, function: Callable[..., ClientSession]) -> Callable[..., ClientSession]:
    @functools.wraps(function)
    def restore(cls: type[ClientSession], *args: Any, **named: Any) -> ClientSession:
        step: Step = {"call": "restore", "args": plain_arguments(function, cls, *args, **named)}
        try:
            with recorder.inside():
                client = function(cls, *args, **named)
        except SnapshotError as error:
            recorder.refused(step | raised(error))
            raise
        recorder.made(client, step)
        return client

    return restore


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record every client session that is created in the context."""
    recorder = Recorder()
    originals = {name: getattr(ClientSession, name) for name in CALLS}
    own = {name: ClientSession.__dict__[name] for name in (*CALLS, "__init__", "restore")}

    def set_attribute(self: ClientSession, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in SETTINGS and not recorder.busy:
            recorder.did(self, {"set": name, "value": trace_json.plain(value)})

    for name, function in originals.items():
        setattr(ClientSession, name, _recorded(recorder, name, function))
    ClientSession.__init__ = _recorded_create(recorder, own["__init__"])  # type: ignore[method-assign]
    ClientSession.restore = classmethod(_recorded_restore(recorder, own["restore"].__func__))  # type: ignore
    ClientSession.__setattr__ = set_attribute  # type: ignore[method-assign]
    try:
        yield recorder
    finally:
        del ClientSession.__setattr__
        for name, function in own.items():
            setattr(ClientSession, name, function)
