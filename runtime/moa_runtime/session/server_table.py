"""The transition table of the verifier's session.

:class:`~moa_runtime.session.server.ServerSession` looks up every frame of the client here; ``docs/protocol.md`` shows
the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class State(enum.Enum):
    """State of a conversation at the verifier; the value describes it."""

    IDLE = "no answer: no Prompt arrived, or the answer was cancelled"
    PROMPTED = "a Prompt arrived, no token is decided after it"
    ANSWERING = "an answer is running, and some tokens of it are decided"
    ENDED = "the answer has ended"


class Event(enum.Enum):
    """Kind of a frame from the client, given the committed tokens; the value describes it."""

    STALE = "frame of an older epoch, or unsolicited Draft of a newer one"
    BEYOND_COMMITTED = "Prompt or Draft at a position after the committed tokens"
    PROMPT = "Prompt of a newer epoch"
    PROMPT_REPEATED = "Prompt of this epoch that ends at the same position as the last one"
    PROMPT_CONFLICT = "any other Prompt of this epoch"
    DRAFT = "Draft of this epoch at the end of the committed tokens, within the answer"
    DRAFT_EARLIER = "Draft of this epoch at an earlier position of the answer"
    DRAFT_UNSOLICITED = "unsolicited Draft of this epoch"
    DRAFT_OUTSIDE_ANSWER = "Draft of a newer epoch, or at a position outside an answer"
    CREDIT = "Credit of this epoch, up to a position that was not sent to the client yet"
    CREDIT_REVOKED = "Credit of this epoch, up to a position that was already sent to the client"
    CREDIT_NEWER_EPOCH = "Credit of a newer epoch"
    CANCEL = "Cancel of this epoch or a newer one"
    PING = "Ping"
    UNEXPECTED = "a second Hello, or an unknown event"


class Action(enum.Enum):
    """What the session does with a frame; the value describes it."""

    DROP = "drop the frame"
    BEGIN_ANSWER = "drop the tokens from base_len on, append the Prompt's and decide one token: Verdict"
    DECIDE_TOKEN = "decide one token: Verdict"
    VERIFY = "run the target over the draft: Verdict"
    KEEP_DRAFT = "keep the draft, if it is valid, and forget the one before; send nothing"
    REPEAT = "send a Verdict with all tokens decided from its position on, without the engine"
    GRANT_CREDIT = "set the credit; Verdict with the tokens that were not sent yet, if there are any"
    REVOKE_CREDIT = "set the credit; CreditRevoked"
    CANCEL = "drop the tokens from base_len on and end the answer; send nothing"
    ANSWER_PING = "Pong"
    OUT_OF_SYNC = "Fault OUT_OF_SYNC with the number of committed tokens"
    NO_ANSWER = "Fault OUT_OF_SYNC with the number of committed tokens, or the position if that is less"
    REFUSE = "Fault PROTOCOL"


class Transition(NamedTuple):
    """What a frame does in a state.

    Attributes:
        action: what the session does.
        next_state: the state that follows at once; None if the state stays the same. It also stays the same if the
            content of the frame is refused. A decided Verdict leads to ANSWERING or ENDED.
    """

    action: Action
    next_state: State | None = None


#: Events whose content is validated before the table is consulted; invalid content is answered by a Fault.
CHECKED = frozenset({Event.PROMPT, Event.DRAFT, Event.DRAFT_EARLIER})


def _always(action: Action, next_state: State | None = None) -> dict[State, Transition]:
    return dict.fromkeys(State, Transition(action, next_state))


#: Transitions by event and state; pairs that cannot occur are missing.
FRAMES: Mapping[Event, Mapping[State, Transition]] = {
    Event.STALE: _always(Action.DROP),
    Event.BEYOND_COMMITTED: _always(Action.OUT_OF_SYNC),
    Event.PROMPT: _always(Action.BEGIN_ANSWER, State.PROMPTED),
    Event.PROMPT_REPEATED: {
        State.PROMPTED: Transition(Action.DECIDE_TOKEN),
        State.ANSWERING: Transition(Action.REPEAT),
        State.ENDED: Transition(Action.REPEAT),
    },
    Event.PROMPT_CONFLICT: _always(Action.REFUSE),
    Event.DRAFT: {
        State.PROMPTED: Transition(Action.VERIFY),
        State.ANSWERING: Transition(Action.VERIFY),
        State.ENDED: Transition(Action.DROP),
    },
    Event.DRAFT_EARLIER: {
        State.ANSWERING: Transition(Action.REPEAT),
        State.ENDED: Transition(Action.REPEAT),
    },
    Event.DRAFT_UNSOLICITED: _always(Action.KEEP_DRAFT),
    Event.DRAFT_OUTSIDE_ANSWER: _always(Action.NO_ANSWER),
    Event.CREDIT: _always(Action.GRANT_CREDIT),
    Event.CREDIT_REVOKED: _always(Action.REVOKE_CREDIT),
    Event.CREDIT_NEWER_EPOCH: _always(Action.NO_ANSWER),
    Event.CANCEL: _always(Action.CANCEL, State.IDLE),
    Event.PING: _always(Action.ANSWER_PING),
    Event.UNEXPECTED: _always(Action.REFUSE),
}
