"""The rules of the device's end as a table: what a call does in which state, and what an arriving frame.

:class:`~moa_runtime.session.client.ClientSession` looks everything up here; ``docs/porting.md`` shows it, and a port in
another language has the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class State(enum.Enum):
    """Where a client session is; the value says it in words."""

    DOWN = "no connection, no answer runs"
    WRITING = "no connection, an answer runs"
    GREETING = "the Hello is sent, no answer runs"
    RETURNING = "the Hello is sent, an answer runs"
    IDLE = "the link is up, no answer runs"
    OWING = "an answer runs, and the server lacks tokens that only a Prompt gives it"
    DRAFTING = "an answer runs, and the device may propose"
    PROMPTED = "the verdict on a Prompt is awaited"
    PROPOSED = "the verdict on a Draft is awaited, or the one that the Welcome announced"
    LENT = "the server goes on by itself, within the credit"
    RECLAIMING = "the credit is withdrawn, the Standing is awaited"


#: The server is to speak next.
AWAITING = frozenset({State.PROMPTED, State.PROPOSED, State.LENT, State.RECLAIMING})
_OURS = {State.OWING, State.DRAFTING}
_IDLE = {State.DOWN, State.GREETING, State.IDLE}
_AWAY = {State.WRITING, State.RETURNING}
_RUNNING = {*_AWAY, *_OURS, *AWAITING}
_UP = {State.IDLE, *_OURS, *AWAITING}

States = frozenset[State]


class Call(enum.Enum):
    """What the application asks for."""

    CONNECT = "connect"
    DISCONNECTED = "disconnected"
    PROMPT = "prompt"
    CONTINUE = "continue_answer"
    EXTEND = "extend"
    PROPOSE = "propose"
    LEND = "lend"
    TAKE_OVER = "take_over"
    RESEND = "resend"
    RESUME = "resume"
    CANCEL = "cancel"
    REWIND = "rewind"
    KEEP = "keep"


class Rule(NamedTuple):
    """A call.

    Attributes:
        effect: what it does, in words.
        leads: what may follow in the states in which it does that.
        refusal: the sentence of the LocalProtocolError in all others; without one nothing happens there.
    """

    effect: str
    leads: Mapping[State, States]
    refusal: str = ""


def _to(*states: State) -> States:
    return frozenset(states)


def _stay(states: set[State] | States) -> dict[State, States]:
    return {state: _to(state) for state in states}


def _all_to(states: set[State] | States, *following: State) -> dict[State, States]:
    return dict.fromkeys(states, _to(*following))


CALLS: Mapping[Call, Rule] = {
    Call.CONNECT: Rule(
        "Hello",
        {State.DOWN: _to(State.GREETING), State.WRITING: _to(State.RETURNING)},
        "can't connect while the link is {link}",
    ),
    Call.DISCONNECTED: Rule(
        "the link is down; frames under way are forgotten, tokens and the credit stay",
        _all_to(_IDLE, State.DOWN) | _all_to(_RUNNING, State.WRITING),
    ),
    Call.PROMPT: Rule(
        "the tokens are supplied, a new epoch begins; Prompt, if the link is up",
        {
            State.DOWN: _to(State.WRITING),
            State.GREETING: _to(State.RETURNING),
            State.IDLE: _to(State.PROMPTED),
        },
        "can't take a prompt while an answer runs; cancel it first",
    ),
    Call.CONTINUE: Rule(
        "an answer that has ended runs again, a new epoch begins; Prompt, if the link is up",
        {
            State.DOWN: _to(State.WRITING),
            State.GREETING: _to(State.RETURNING),
            State.IDLE: _to(State.PROMPTED, State.OWING),
        },
        "can't continue an answer while one runs; cancel it first",
    ),
    Call.EXTEND: Rule("the tentative suffix grows", _stay(_RUNNING), "can't extend: no answer runs"),
    Call.PROPOSE: Rule("Draft", {State.DRAFTING: _to(State.PROPOSED)}),
    Call.LEND: Rule(
        "Credit up to a position behind what is known",
        {
            State.DRAFTING: _to(State.LENT),
            State.PROMPTED: _to(State.PROMPTED),
            State.PROPOSED: _to(State.PROPOSED),
            State.LENT: _to(State.LENT),
        },
        "can't lend a credit up to {position}: the link is {link}, {known} known",
    ),
    Call.TAKE_OVER: Rule(
        "Credit of position 0, if one is open",
        {
            State.PROMPTED: _to(State.PROMPTED, State.RECLAIMING),
            State.PROPOSED: _to(State.PROPOSED, State.RECLAIMING),
            State.LENT: _to(State.RECLAIMING),
        },
    ),
    Call.RESEND: Rule(
        "once more the frame that awaits its verdict, and the newest Credit", _stay({State.DRAFTING, *AWAITING})
    ),
    Call.RESUME: Rule(
        "Prompt with what the server lacks, if it is held back no longer",
        {State.OWING: _to(State.PROMPTED, State.OWING)},
    ),
    Call.CANCEL: Rule(
        "supplied and tentative tokens are dropped, a new epoch begins; Cancel, if the link is up",
        {
            State.DOWN: _to(State.DOWN),
            State.WRITING: _to(State.DOWN),
            State.GREETING: _to(State.GREETING),
            State.RETURNING: _to(State.GREETING),
        }
        | _all_to(_UP, State.IDLE),
    ),
    Call.REWIND: Rule(
        "committed tokens from a position on are forgotten; the next Prompt says so",
        _stay(_IDLE),
        "can't rewind while an answer runs; cancel it first",
    ),
    Call.KEEP: Rule(
        "the answer is cut at a position, the kept tokens are supplied, a new epoch begins; Prompt, if the link is up",
        {
            State.DOWN: _to(State.WRITING),
            State.WRITING: _to(State.WRITING),
            State.GREETING: _to(State.RETURNING),
            State.RETURNING: _to(State.RETURNING),
        }
        | _all_to(_UP, State.PROMPTED),
    ),
}


class Heard(enum.Enum):
    """What a frame from the server says."""

    WELCOME = "Welcome"
    VERDICT = "Verdict"
    STANDING = "Standing"
    STALE = "Verdict, Standing or Fault of another epoch"
    ROWS = "MemoryRows"
    PONG = "Pong"
    OUT_OF_SYNC = "Fault OUT_OF_SYNC"
    FAULT = "any other Fault"


class Does(enum.Enum):
    """What comes of a frame; the value says it in words."""

    DROP = "dropped"
    SETTLE = "a Cancel, if the server's epoch is another one and not 0"
    RECONCILE = "goes on where both ends are alike; else a Prompt with what the server lacks"
    COMMIT = "what is new in it is committed"
    COMMIT_COPY = "what is new in it is committed, if something was sent twice on this connection; else dropped"
    STAND = "the server stands, if the serial is that of the newest Credit"
    STORE = "rows of what is committed are handed on, up to a gap or a cut"
    NOTE = "its echo is handed on"
    REPLAY = "a Prompt from where the server is; after eight without a verdict the fault is told"
    TELL = "told to the application"


class Row(NamedTuple):
    """What a frame does in a state, and what may follow: the state stays where nothing is named, and wherever a frame
    is broken or says nothing new."""

    does: Does
    leads: States = frozenset()


_ENDED = {State.IDLE, State.PROMPTED, State.OWING}  # or overruled by the policy KEEP
_DECIDED = _to(State.DRAFTING, State.LENT, *_ENDED)

#: What is missing is dropped.
FRAMES: Mapping[Heard, Mapping[State, Row]] = {
    Heard.WELCOME: {
        State.GREETING: Row(Does.SETTLE, _to(State.IDLE)),
        State.RETURNING: Row(
            Does.RECONCILE, _to(State.PROPOSED, State.DRAFTING, State.LENT, State.PROMPTED, State.OWING)
        ),
    },
    Heard.VERDICT: {
        State.PROMPTED: Row(Does.COMMIT, _DECIDED),
        State.PROPOSED: Row(Does.COMMIT, _DECIDED),
        State.LENT: Row(Does.COMMIT, _DECIDED),
        State.RECLAIMING: Row(Does.COMMIT, _to(*_ENDED)),
        State.DRAFTING: Row(Does.COMMIT_COPY, _to(*_ENDED)),
    },
    Heard.STANDING: {
        State.RECLAIMING: Row(Does.STAND, _to(State.DRAFTING, State.PROMPTED, State.PROPOSED)),
    },
    Heard.STALE: {},
    Heard.ROWS: dict.fromkeys(State, Row(Does.STORE)),
    Heard.PONG: dict.fromkeys(State, Row(Does.NOTE)),
    Heard.OUT_OF_SYNC: {
        **dict.fromkeys(AWAITING, Row(Does.REPLAY, _to(State.PROMPTED, State.OWING))),
        **dict.fromkeys(_OURS | _AWAY, Row(Does.TELL)),
    },
    Heard.FAULT: dict.fromkeys(State, Row(Does.TELL)),
}

_DROPPED = Row(Does.DROP)


def row_of(heard: Heard, state: State) -> Row:
    """The table's row of a frame in a state."""
    return FRAMES[heard].get(state, _DROPPED)
