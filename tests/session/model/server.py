"""The verifier's end. Functions of a session and a frame; what they return is the next session and frames to send."""

from __future__ import annotations

from typing import NamedTuple

from session.model.frames import (
    Cancel,
    Credit,
    Down,
    Draft,
    Fault,
    Hello,
    Prompt,
    Rows,
    Standing,
    Tokens,
    Verdict,
    Welcome,
    choice,
    row,
)


class Work(NamedTuple):
    """A step under way, behind all that is committed."""

    draft: Tokens
    pushed: bool


class Session(NamedTuple):
    """A conversation. ``limit`` 0 is: no answer runs."""

    token: int
    committed: Tokens = ()
    epoch: int = 0
    answer_from: int = 0
    limit: int = 0
    while_away: bool = False
    credit: int = 0
    connection: int = 0  # the count of the newest Hello
    attached: int = 0  # the connection in the world; 0 for none
    rows_sent: int = 0
    work: Work | None = None
    held: tuple[Draft, ...] = ()  # until the step under way has ended
    stops: int | None = None  # the serial of the Standing that is owed
    aligned: bool = True  # what is committed is so at the device too, or on its way there

    @property
    def finished(self) -> bool:
        return len(self.committed) >= self.limit > 0


Answered = tuple[Session, tuple[Down, ...]]


def greet(session: Session, hello: Hello, conn: int) -> Answered:
    """A new connection of a known session."""
    if session.attached and hello.connection < session.connection:
        return session, (Fault("REPLACED"),)
    known = [mark for mark in hello.marks if session.committed[: len(mark)] == mark]
    agreed = max((len(mark) for mark in known), default=0)
    same = hello.epoch == session.epoch and agreed == len(hello.marks[-1])
    goes_on = same and hello.answering and session.limit > 0
    session = session._replace(
        attached=conn,
        connection=max(session.connection, hello.connection),
        rows_sent=min(hello.rows, agreed),
        credit=hello.credit if goes_on else 0,
        held=(),
        aligned=goes_on or (same and agreed == len(session.committed)),
    )
    if not goes_on:
        session = session._replace(work=None, while_away=False)
    news = goes_on and len(session.committed) > agreed
    stops = goes_on and session.credit <= len(session.committed) and (news or session.work is not None)
    session, behind = _go_on(session._replace(stops=0 if stops else None))
    welcome = Welcome(session.token, session.connection, session.epoch, agreed, stops)
    return session, (welcome, *((_verdict(session, agreed),) if news else ()), *behind)


def leave(session: Session) -> Session:
    """The connection is gone."""
    session = session._replace(attached=0, held=(), stops=None, credit=0)
    if not session.while_away:
        return session._replace(work=None)
    return _go_on(session)[0]


def receive(session: Session, frame: Prompt | Draft | Credit | Cancel) -> Answered:
    if frame.epoch < session.epoch:
        return session, ()
    if isinstance(frame, Prompt):
        return _prompt(session, frame)
    if isinstance(frame, Cancel):
        kept = session.committed[: frame.base]
        rows = min(session.rows_sent, frame.base)
        cut = session._replace(committed=kept, epoch=frame.epoch, limit=0, credit=0, work=None, held=(), rows_sent=rows)
        return cut._replace(stops=None, aligned=True), ()
    if frame.epoch > session.epoch:
        return session, (Fault("OUT_OF_SYNC"),)
    if isinstance(frame, Credit):
        stops = frame.serial if frame.position <= len(session.committed) else None
        return _go_on(session._replace(credit=frame.position, stops=stops))
    if frame.base > len(session.committed) or frame.base < session.answer_from or not session.limit:
        return session, (Fault("OUT_OF_SYNC"),)
    return _go_on(session._replace(held=(*session.held, frame)))


def end_step(session: Session, pushed: int) -> Answered:
    """The step under way has ended; a server's own draft brings ``pushed`` tokens."""
    work, committed = session.work, session.committed
    assert work is not None
    right = 0
    while True:
        token = choice(committed)
        committed += (token,)
        drafted = right < pushed - 1 if work.pushed else right < len(work.draft) and work.draft[right] == token
        if len(committed) >= session.limit or not drafted:
            break
        right += 1
    base = len(session.committed)
    session = session._replace(committed=committed, work=None)
    # Decided for whoever asked: the Draft that did is not held any more.
    session, behind = _go_on(session)
    return session, (_verdict(session, base, len(committed)), *behind)


def fail_step(session: Session) -> Answered:
    """The engine failed."""
    return session._replace(work=None, credit=0, held=(), stops=None), (Fault("INTERNAL"),)


def send_rows(session: Session) -> Answered:
    """Behind the text. The last token has no row: the target has not processed it."""
    end = len(session.committed) - 1
    rows = tuple(row(session.committed, at) for at in range(session.rows_sent, end))
    return session._replace(rows_sent=end), (Rows(session.epoch, session.rows_sent, rows),)


def rows_due(session: Session) -> bool:
    return (
        bool(session.attached)
        and session.aligned
        and session.rows_sent < len(session.committed) - 1
        and session.work is None
    )


def _prompt(session: Session, prompt: Prompt) -> Answered:
    end = prompt.base + len(prompt.tokens)
    if prompt.epoch == session.epoch:  # a copy: its verdict comes, or came and was lost
        if len(session.committed) > end:
            return session, (_verdict(session, end),)
        return _go_on(session._replace(work=session.work or Work((), False)))
    if prompt.base > len(session.committed):
        return session, (Fault("OUT_OF_SYNC"),)
    session = session._replace(
        committed=session.committed[: prompt.base] + prompt.tokens,
        epoch=prompt.epoch,
        answer_from=end,
        limit=prompt.limit,
        while_away=prompt.while_away,
        credit=0,
        rows_sent=max(prompt.rows_from, min(session.rows_sent, prompt.base)),
        work=Work((), False),
        held=(),
        stops=None,
        aligned=True,
    )
    return session, ()


def _go_on(session: Session) -> Answered:
    """Begin the next step, if there is one, and say what can be said without."""
    out: list[Down] = []
    while session.work is None and session.held:
        draft, *others = session.held
        session = session._replace(held=tuple(others))
        if draft.base < len(session.committed):
            out.append(_verdict(session, draft.base))
        elif not session.finished:
            session = session._replace(work=Work(draft.tokens, False))
    if session.work is None and session.limit and not session.finished:
        wanted = len(session.committed) < session.credit if session.attached else session.while_away
        if wanted:
            session = session._replace(work=Work((), True))
    if session.work is None and session.stops is not None:
        out.append(Standing(session.epoch, session.stops))
        session = session._replace(stops=None)
    return session, tuple(out)


def _verdict(session: Session, base: int, end: int | None = None) -> Verdict:
    tokens = session.committed[base:end]
    return Verdict(session.epoch, base, tokens, base + len(tokens) >= session.limit)
