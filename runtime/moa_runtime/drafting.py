"""What session and drafter do together."""

from __future__ import annotations

from moa_runtime.drafters.base import Drafter
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Origin


def lengthen(session: ClientSession, drafter: Drafter, logprob: float) -> bool:
    """Put behind a draft that is complete what its drafter knows besides; says whether there was any.

    The answer and the draft do not become longer than was asked for and than the verifier takes.

    Args:
        logprob: of the draft, see :meth:`moa_runtime.drafters.base.Drafter.lengthen`.
    """
    if not session.tentative or session.tentatively_finished:
        return False
    room = session.limits.max_draft_tokens - len(session.tentative)
    if session.room is not None:
        room = min(room, session.room)
    known = [token.token for token in drafter.lengthen(session.tokens, logprob)[: max(0, room)]]
    session.extend(known, Origin.DRAFTED)
    return bool(known)
