"""The transition table of the client session.

:class:`~moa_runtime.session.client.ClientSession` looks up every call of the application and every frame of the
server here. ``docs/protocol.md`` shows the table; ports in other languages have the same one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class State(enum.Enum):
    """State of a client session; the value describes it."""

    DOWN = "not connected, no answer is running"
    OFFLINE_ANSWERING = "not connected, an answer is running"
    HANDSHAKE = "Hello sent, no answer is running"
    RESUMING = "Hello sent, an answer is running"
    IDLE = "connected, no answer is running"
    NEEDS_PROMPT = "an answer is running, and the server lacks tokens that only a Prompt can give it"
    DRAFTING = "an answer is running, and the device may send a Draft"
    PROMPTED = "waiting for the Verdict on a Prompt"
    PROPOSED = "waiting for the Verdict on a Draft, or for the one announced by the Welcome"
    STREAMING = "the server pushes Verdicts within its credit"
    REVOKING = "the credit is revoked, waiting for CreditRevoked"


#: States in which the next frame is due from the server.
AWAITING = frozenset({State.PROMPTED, State.PROPOSED, State.STREAMING, State.REVOKING})
_CLIENTS_TURN = {State.NEEDS_PROMPT, State.DRAFTING}
_NO_ANSWER = {State.DOWN, State.HANDSHAKE, State.IDLE}
_NOT_CONNECTED = {State.OFFLINE_ANSWERING, State.RESUMING}
_ANSWERING = {*_NOT_CONNECTED, *_CLIENTS_TURN, *AWAITING}
_CONNECTED = {State.IDLE, *_CLIENTS_TURN, *AWAITING}

States = frozenset[State]


class Call(enum.Enum):
    """Call of the application: a method of :class:`~moa_runtime.session.client.ClientSession`."""

    CONNECT = "connect"
    DISCONNECTED = "disconnected"
    PROMPT = "prompt"
    CONTINUE = "continue_answer"
    EXTEND = "extend"
    PROPOSE = "propose"
    SEND_UNSOLICITED = "send_unsolicited"
    GRANT_CREDIT = "grant_credit"
    REVOKE_CREDIT = "revoke_credit"
    RESEND = "resend"
    RESUME = "resume"
    CANCEL = "cancel"
    REWIND = "rewind"
    KEEP = "keep"


class Rule(NamedTuple):
    """Rule for a call.

    Attributes:
        effect: what the call does, for the documentation.
        next_states: states in which the call is allowed, with the states that may follow each.
        refusal: message of the LocalProtocolError raised in all other states; if empty, the call does nothing there.
    """

    effect: str
    next_states: Mapping[State, States]
    refusal: str = ""


def _to(*states: State) -> States:
    return frozenset(states)


def _stay(states: set[State] | States) -> dict[State, States]:
    return {state: _to(state) for state in states}


def _all_to(states: set[State] | States, *following: State) -> dict[State, States]:
    return dict.fromkeys(states, _to(*following))


CALLS: Mapping[Call, Rule] = {
    Call.CONNECT: Rule(
        "send Hello",
        {State.DOWN: _to(State.HANDSHAKE), State.OFFLINE_ANSWERING: _to(State.RESUMING)},
        "can't connect while the link is {link}",
    ),
    Call.DISCONNECTED: Rule(
        "take the link down; frames in flight are dropped, tokens and credit are kept",
        _all_to(_NO_ANSWER, State.DOWN) | _all_to(_ANSWERING, State.OFFLINE_ANSWERING),
    ),
    Call.PROMPT: Rule(
        "supply the tokens and begin an epoch; if connected, send Prompt",
        {
            State.DOWN: _to(State.OFFLINE_ANSWERING),
            State.HANDSHAKE: _to(State.RESUMING),
            State.IDLE: _to(State.PROMPTED),
        },
        "can't take a prompt while an answer is running; cancel it first",
    ),
    Call.CONTINUE: Rule(
        "run a finished answer again and begin an epoch; if connected, send Prompt",
        {
            State.DOWN: _to(State.OFFLINE_ANSWERING),
            State.HANDSHAKE: _to(State.RESUMING),
            State.IDLE: _to(State.PROMPTED, State.NEEDS_PROMPT),
        },
        "can't continue an answer while one is running; cancel it first",
    ),
    Call.EXTEND: Rule("append to the tentative suffix", _stay(_ANSWERING), "can't extend: no answer is running"),
    Call.PROPOSE: Rule("send Draft", {State.DRAFTING: _to(State.PROPOSED)}),
    Call.SEND_UNSOLICITED: Rule(
        "send an unsolicited Draft, if the server reads them",
        {State.STREAMING: _to(State.STREAMING)},
        "can't send an unsolicited draft of position {position}: the link is {link}, {known} tokens are known",
    ),
    Call.GRANT_CREDIT: Rule(
        "send Credit up to a position after the known tokens",
        {
            State.DRAFTING: _to(State.STREAMING),
            State.PROMPTED: _to(State.PROMPTED),
            State.PROPOSED: _to(State.PROPOSED),
            State.STREAMING: _to(State.STREAMING),
        },
        "can't grant credit up to position {position}: the link is {link}, {known} tokens are known",
    ),
    Call.REVOKE_CREDIT: Rule(
        "send Credit of position 0, if credit is open",
        {
            State.PROMPTED: _to(State.PROMPTED, State.REVOKING),
            State.PROPOSED: _to(State.PROPOSED, State.REVOKING),
            State.STREAMING: _to(State.REVOKING),
        },
    ),
    Call.RESEND: Rule(
        "send the frame that awaits its Verdict and the newest Credit again", _stay({State.DRAFTING, *AWAITING})
    ),
    Call.RESUME: Rule(
        "send Prompt with the tokens that the server lacks, unless requests are held",
        {State.NEEDS_PROMPT: _to(State.PROMPTED, State.NEEDS_PROMPT)},
    ),
    Call.CANCEL: Rule(
        "drop supplied and tentative tokens and begin an epoch; if connected, send Cancel",
        {
            State.DOWN: _to(State.DOWN),
            State.OFFLINE_ANSWERING: _to(State.DOWN),
            State.HANDSHAKE: _to(State.HANDSHAKE),
            State.RESUMING: _to(State.HANDSHAKE),
        }
        | _all_to(_CONNECTED, State.IDLE),
    ),
    Call.REWIND: Rule(
        "drop committed tokens from a position on; the next Prompt tells the server",
        _stay(_NO_ANSWER),
        "can't rewind while an answer is running; cancel it first",
    ),
    Call.KEEP: Rule(
        "truncate the answer at a position, supply the kept tokens and begin an epoch; if connected, send Prompt",
        {
            State.DOWN: _to(State.OFFLINE_ANSWERING),
            State.OFFLINE_ANSWERING: _to(State.OFFLINE_ANSWERING),
            State.HANDSHAKE: _to(State.RESUMING),
            State.RESUMING: _to(State.RESUMING),
        }
        | _all_to(_CONNECTED, State.PROMPTED),
    ),
}


class Event(enum.Enum):
    """Kind of a frame from the server; the value describes it."""

    WELCOME = "Welcome"
    VERDICT = "Verdict"
    CREDIT_REVOKED = "CreditRevoked"
    STALE = "Verdict, CreditRevoked or Fault of another epoch"
    ROWS = "MemoryRows"
    PONG = "Pong"
    OUT_OF_SYNC = "Fault OUT_OF_SYNC"
    FAULT = "any other Fault"


class Action(enum.Enum):
    """What the session does with a frame; the value describes it."""

    DROP = "drop the frame"
    CANCEL_STALE_ANSWER = "send Cancel, if the server's epoch is neither 0 nor the client's"
    RECONCILE = "continue if both ends agree; else send Prompt with the tokens that the server lacks"
    COMMIT = "commit the new tokens"
    COMMIT_IF_RESENT = "commit the new tokens, if something was sent twice on this connection; else drop the frame"
    END_REVOCATION = "end the revocation, if the serial is that of the newest Credit"
    STORE_ROWS = "pass on the rows of committed tokens, up to a gap or a truncation"
    PASS_ECHO = "pass on the echo"
    REPLAY = "send Prompt from the server's length on; after eight faults without a Verdict, report the fault"
    REPORT = "report the fault to the application"


class Transition(NamedTuple):
    """What a frame does in a state.

    Attributes:
        action: what the session does.
        next_states: states that may follow. The state stays the same if there are none, if the frame is broken, and if
            it brings nothing new.
    """

    action: Action
    next_states: States = frozenset()


_ENDED = {State.IDLE, State.PROMPTED, State.NEEDS_PROMPT}  # the last two: the policy KEEP overrules the verdict
_DECIDED = _to(State.DRAFTING, State.STREAMING, *_ENDED)

#: Transitions by event and state; a frame is dropped in states without a transition.
FRAMES: Mapping[Event, Mapping[State, Transition]] = {
    Event.WELCOME: {
        State.HANDSHAKE: Transition(Action.CANCEL_STALE_ANSWER, _to(State.IDLE)),
        State.RESUMING: Transition(
            Action.RECONCILE,
            _to(State.PROPOSED, State.DRAFTING, State.STREAMING, State.PROMPTED, State.NEEDS_PROMPT),
        ),
    },
    Event.VERDICT: {
        State.PROMPTED: Transition(Action.COMMIT, _DECIDED),
        State.PROPOSED: Transition(Action.COMMIT, _DECIDED),
        State.STREAMING: Transition(Action.COMMIT, _DECIDED),
        State.REVOKING: Transition(Action.COMMIT, _to(*_ENDED)),
        State.DRAFTING: Transition(Action.COMMIT_IF_RESENT, _to(*_ENDED)),
    },
    Event.CREDIT_REVOKED: {
        State.REVOKING: Transition(Action.END_REVOCATION, _to(State.DRAFTING, State.PROMPTED, State.PROPOSED)),
    },
    Event.STALE: {},
    Event.ROWS: dict.fromkeys(State, Transition(Action.STORE_ROWS)),
    Event.PONG: dict.fromkeys(State, Transition(Action.PASS_ECHO)),
    Event.OUT_OF_SYNC: {
        **dict.fromkeys(AWAITING, Transition(Action.REPLAY, _to(State.PROMPTED, State.NEEDS_PROMPT))),
        **dict.fromkeys(_CLIENTS_TURN | _NOT_CONNECTED, Transition(Action.REPORT)),
    },
    Event.FAULT: dict.fromkeys(State, Transition(Action.REPORT)),
}

_DROPPED = Transition(Action.DROP)


def transition(event: Event, state: State) -> Transition:
    """Return what a frame does in a state."""
    return FRAMES[event].get(state, _DROPPED)
