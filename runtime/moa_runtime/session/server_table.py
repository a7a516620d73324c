"""The rules of the verifier's end as a table: what an arriving frame does in which state.

:class:`~moa_runtime.session.server.ServerSession` looks everything up here; ``docs/porting.md`` shows it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class State(enum.Enum):
    """Where a conversation is at the verifier; the value says it in words."""

    SILENT = "no answer: nothing was asked, or it was cancelled"
    ASKED = "a Prompt was taken, nothing is decided behind it"
    WRITING = "an answer runs, and some of it is decided"
    ENDED = "the answer has ended"


class Heard(enum.Enum):
    """What a frame says, beside what is known of the conversation."""

    STALE = "a frame of an older epoch"
    BEYOND = "Prompt or Draft at a position behind all that is committed"
    PROMPT = "Prompt of a newer epoch"
    PROMPT_AGAIN = "Prompt of this epoch that ends where the last one ended"
    PROMPT_OTHER = "any other Prompt of this epoch"
    DRAFT = "Draft of this epoch behind all that is committed, within the answer"
    DRAFT_BEFORE = "Draft of this epoch at an earlier position of the answer"
    DRAFT_OUTSIDE = "Draft of a newer epoch, or at a position of no answer"
    CREDIT = "Credit of this epoch, up to a position behind what the client was told"
    CREDIT_SPENT = "Credit of this epoch, up to a position that the client was told already"
    CREDIT_EARLY = "Credit of a newer epoch"
    CANCEL = "Cancel of this epoch or a newer one"
    PING = "Ping"
    OTHER = "a second Hello, or an event that is not known"


class Does(enum.Enum):
    """What comes of a frame; the value says it in words."""

    DROP = "dropped"
    BEGIN = "tokens from base_len on are forgotten, the Prompt's appended, and one token is decided: Verdict"
    DECIDE = "one token is decided: Verdict"
    VERIFY = "the target runs over the draft: Verdict"
    REPEAT = "Verdict with all that is decided from its position on, without the engine"
    LEND = "the credit is set; Verdict with what the client was not told, if there is any"
    STAND = "the credit is set; Standing"
    STOP = "tokens from base_len on are forgotten, and the answer ends; nothing is sent"
    ANSWER_PING = "Pong"
    LACKS = "Fault OUT_OF_SYNC with the number of committed tokens"
    NO_ANSWER = "Fault OUT_OF_SYNC with the number of committed tokens, or the position if that is less"
    REFUSE = "Fault PROTOCOL"


class Row(NamedTuple):
    """What a frame does in a state, and what follows at once: the state stays where nothing is named, and wherever the
    frame is refused for its content. A verdict on what was verified leads to WRITING or ENDED."""

    does: Does
    leads: State | None = None


#: Whose content is looked at before the table: what is wrong with it is answered by a Fault, in every state.
CHECKED = frozenset({Heard.PROMPT, Heard.DRAFT, Heard.DRAFT_BEFORE})


def _always(does: Does, leads: State | None = None) -> dict[State, Row]:
    return dict.fromkeys(State, Row(does, leads))


#: A pair that is missing cannot be.
FRAMES: Mapping[Heard, Mapping[State, Row]] = {
    Heard.STALE: _always(Does.DROP),
    Heard.BEYOND: _always(Does.LACKS),
    Heard.PROMPT: _always(Does.BEGIN, State.ASKED),
    Heard.PROMPT_AGAIN: {
        State.ASKED: Row(Does.DECIDE),
        State.WRITING: Row(Does.REPEAT),
        State.ENDED: Row(Does.REPEAT),
    },
    Heard.PROMPT_OTHER: _always(Does.REFUSE),
    Heard.DRAFT: {
        State.ASKED: Row(Does.VERIFY),
        State.WRITING: Row(Does.VERIFY),
        State.ENDED: Row(Does.DROP),
    },
    Heard.DRAFT_BEFORE: {
        State.WRITING: Row(Does.REPEAT),
        State.ENDED: Row(Does.REPEAT),
    },
    Heard.DRAFT_OUTSIDE: _always(Does.NO_ANSWER),
    Heard.CREDIT: _always(Does.LEND),
    Heard.CREDIT_SPENT: _always(Does.STAND),
    Heard.CREDIT_EARLY: _always(Does.NO_ANSWER),
    Heard.CANCEL: _always(Does.STOP, State.SILENT),
    Heard.PING: _always(Does.ANSWER_PING),
    Heard.OTHER: _always(Does.REFUSE),
}
