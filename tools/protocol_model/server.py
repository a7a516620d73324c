"""The verifier's end. Functions of a session and a frame; what they return is the next session and frames to send."""

from __future__ import annotations

from typing import NamedTuple

from protocol_model.frames import (
    Cancel,
    Credit,
    CreditRevoked,
    Down,
    Draft,
    Fault,
    Hello,
    Prompt,
    Rows,
    Tokens,
    Unsolicited,
    Verdict,
    Welcome,
    choice,
    row,
)

Frame = Prompt | Draft | Credit | Cancel


class Work(NamedTuple):
    """A step under way, behind all that is committed."""

    draft: Tokens = ()
    pushed: bool = False  # no frame asked for it
    told: bool = True  # the device is sent the verdict


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
    waiting: tuple[Frame, ...] = ()  # until the step under way has ended
    told: int = 0  # so much of what is committed was said on this connection, or by the device
    asked: bool = True  # an answer goes on, or began, on this connection
    kept: Unsolicited | None = None  # the newest
    kept_of: int = 0  # the connection that brought it

    @property
    def runs(self) -> bool:
        return len(self.committed) < self.limit

    @property
    def pushes(self) -> bool:
        return bool(self.attached) and self.runs and len(self.committed) < self.credit


Answered = tuple[Session, tuple[Down, ...]]


def greet(session: Session, hello: Hello, conn: int) -> Answered:
    """A new connection of a known session; what the one before waited for is not done."""
    if session.attached and hello.connection < session.connection:
        return session, (Fault("REPLACED"),)
    known = [mark for mark in hello.marks if session.committed[: len(mark)] == mark]
    agreed = max((len(mark) for mark in known), default=0)
    same = hello.answering and hello.epoch == session.epoch and 0 < agreed == len(hello.marks[-1])
    news = same and session.limit > 0 and session.answer_from <= agreed < len(session.committed)
    session = session._replace(
        attached=conn,
        connection=max(session.connection, hello.connection),
        rows_sent=min(hello.rows, agreed),
        credit=hello.credit if same else 0,
        while_away=session.while_away and same,
        work=None,
        waiting=(),
        told=agreed,
        asked=same,
        kept=None,
    )
    welcome = Welcome(session.token, session.connection, session.epoch, agreed, news)
    if not news:
        return session, (welcome,)
    session, verdict = _known(session, agreed)
    return session, (welcome, *verdict)


def leave(session: Session) -> Session:
    """The connection is gone, and with it what it asked for."""
    return session._replace(attached=0, work=None, waiting=(), credit=0, told=0, kept=None)


def receive(session: Session, frame: Frame) -> Answered:
    """A frame arrived: it is taken when the step under way has ended, or has become needless."""
    unheard = session.work is not None and not session.work.told
    if unheard or _overrules(session, frame):
        session = session._replace(work=None)
    return _take_waiting(session._replace(waiting=(*session.waiting, frame)))


def keep(session: Session, frame: Unsolicited) -> Session:
    """An unsolicited draft arrived: it is taken at once, also during a step, and never answered."""
    within = session.limit > 0 and session.answer_from <= frame.base <= len(session.committed)
    if frame.epoch != session.epoch or not within:
        return session
    return session._replace(kept=frame, kept_of=session.attached)


def newest_draft(session: Session) -> Tokens:
    """What is left of the draft that was kept: nothing if it went wrong."""
    if session.kept is None:
        return ()
    since = session.committed[session.kept.base :]
    return session.kept.tokens[len(since) :] if session.kept.tokens[: len(since)] == since else ()


def go_on(session: Session, *, drafted: bool = True) -> Session:
    """The next step within the credit, with what is left of the device's draft if it pays."""
    return session._replace(work=Work(newest_draft(session) if drafted else (), pushed=True))


def may_go_on_unheard(session: Session) -> bool:
    """The device is away, or says nothing, so that it may be."""
    return session.while_away and session.runs and session.work is None and not session.pushes


def go_on_unheard(session: Session) -> Session:
    return session._replace(work=Work(pushed=True, told=False))


def end_step(session: Session, pushed: int) -> Answered:
    """The step under way has ended; a server's own draft brings ``pushed`` tokens."""
    work, committed = session.work, session.committed
    assert work is not None
    right = 0
    while True:
        token = choice(committed)
        committed += (token,)
        own = work.pushed and not work.draft
        drafted = right < pushed - 1 if own else right < len(work.draft) and work.draft[right] == token
        if len(committed) >= session.limit or not drafted:
            break
        right += 1
    base = len(session.committed)
    session = session._replace(committed=committed, work=None)
    if not work.told:
        return _take_waiting(session)
    session, behind = _take_waiting(session._replace(told=len(committed)))
    verdict = Verdict(session.epoch, base, committed[base:], len(committed) >= session.limit)
    return session, (verdict, *behind)


def fail_step(session: Session) -> Answered:
    """The engine failed. Nothing is done unasked any more; who awaits something hears of it."""
    work = session.work
    assert work is not None
    session, behind = _take_waiting(session._replace(work=None, credit=0 if work.pushed else session.credit))
    return session, ((Fault("INTERNAL"), *behind) if work.told else behind)


def rows_due(session: Session) -> bool:
    here = bool(session.attached) and session.asked and session.work is None
    return here and session.rows_sent < session.told - 1


def send_rows(session: Session) -> Answered:
    """Behind the text that was said. The last token has no row: the target has not processed it."""
    end = session.told - 1
    rows = tuple(row(session.committed, at) for at in range(session.rows_sent, end))
    return session._replace(rows_sent=end), (Rows(session.epoch, session.rows_sent, rows),)


def _take_waiting(session: Session) -> Answered:
    """Frames in their order, until one needs the engine."""
    out: list[Down] = []
    while session.work is None and session.waiting:
        frame, *others = session.waiting
        session, said = _take(session._replace(waiting=tuple(others)), frame)
        out += said
        if any(_overrules(session, other) for other in others):
            session = session._replace(work=None)
    return session, tuple(out)


def _overrules(session: Session, frame: Frame) -> bool:
    return isinstance(frame, Prompt | Cancel) and frame.epoch > session.epoch


def _take(session: Session, frame: Frame) -> Answered:
    if frame.epoch < session.epoch:
        return session, ()
    if isinstance(frame, Prompt):
        return _prompt(session, frame)
    if isinstance(frame, Cancel):
        return _cut(session, frame.base)._replace(epoch=frame.epoch), ()
    if frame.epoch > session.epoch:
        return session, (Fault("OUT_OF_SYNC"),)
    if isinstance(frame, Credit):
        return _credit(session, frame)
    if frame.base > len(session.committed) or frame.base < session.answer_from or not session.limit:
        return session, (Fault("OUT_OF_SYNC"),)
    if frame.base < len(session.committed):
        return _known(session, frame.base)
    return session._replace(work=Work(frame.tokens) if session.runs else None), ()


def _credit(session: Session, credit: Credit) -> Answered:
    session = session._replace(credit=credit.position)
    if credit.position <= session.told:
        return session, (CreditRevoked(session.epoch, credit.serial),)
    return _known(session, session.told) if session.told < len(session.committed) else (session, ())


def _prompt(session: Session, prompt: Prompt) -> Answered:
    end = prompt.base + len(prompt.tokens)
    if prompt.epoch == session.epoch:  # a copy: its verdict was lost, or never made
        return _known(session, end) if len(session.committed) > end else (session._replace(work=Work()), ())
    if prompt.base > len(session.committed):
        return session, (Fault("OUT_OF_SYNC"),)
    cut = _cut(session, prompt.base)
    return cut._replace(
        committed=cut.committed + prompt.tokens,
        epoch=prompt.epoch,
        answer_from=end,
        limit=prompt.limit,
        while_away=prompt.while_away,
        rows_sent=max(prompt.rows_from, cut.rows_sent),
        work=Work(),
        told=end,
        asked=True,
    ), ()


def _cut(session: Session, length: int) -> Session:
    """No answer runs behind what is left."""
    return session._replace(
        committed=session.committed[:length],
        limit=0,
        while_away=False,
        credit=0,
        rows_sent=min(session.rows_sent, length),
        told=min(session.told, length),
        kept=None,
    )


def _known(session: Session, base: int) -> Answered:
    """A verdict on what is decided already."""
    tokens = session.committed[base:]
    verdict = Verdict(session.epoch, base, tokens, base + len(tokens) >= session.limit)
    return session._replace(told=len(session.committed)), (verdict,)
