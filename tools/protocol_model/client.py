"""The device's end. As at the server: functions of a state and of what happens."""

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
    Up,
    Verdict,
    Welcome,
)

#: Credit reaches so far ahead of what is committed.
WINDOW = 2


class WrongError(Exception):
    """The other end said what it must never say."""


class Client(NamedTuple):
    """A conversation, and what is known of the link."""

    committed: Tokens = ()
    supplied: Tokens = ()
    tentative: Tokens = ()
    limit: int = 0  # 0: no answer runs
    while_away: bool = False
    epoch: int = 0
    token: int = 0
    connection: int = 0
    rows: Tokens = ()
    cuts: tuple[tuple[int, int], ...] = ()  # epochs of this connection and where each began
    link: str = "down"  # handshake, up, refused
    awaits: str = ""  # prompt, draft, revocation
    asked_from: int = 0  # where the last Prompt began
    shared: int = 0  # committed tokens that the server has too
    credit: int = 0
    serial: int = 0  # of the newest Credit of this connection
    repeated: bool = False  # something was sent twice on this connection, so it may be answered twice

    @property
    def known(self) -> Tokens:
        return self.committed + self.supplied

    @property
    def may_propose(self) -> bool:
        idle = self.link == "up" and self.limit > 0 and not self.supplied and not self.awaits
        return idle and self.credit <= len(self.committed)

    @property
    def may_send_unsolicited(self) -> bool:
        streams = self.link == "up" and self.limit > 0 and not self.awaits
        return streams and self.credit > len(self.known)


Said = tuple[Client, tuple[Up, ...]]


def connect(client: Client) -> Client:
    """Before the Hello: its count is stored first."""
    return client._replace(
        link="handshake", connection=client.connection + 1, awaits="", cuts=(), serial=0, repeated=False
    )


def hello(client: Client) -> Hello:
    marks = (client.committed, client.known) if client.supplied else (client.committed,)
    return Hello(
        client.token, client.connection, client.epoch, marks, client.limit > 0, client.credit, len(client.rows)
    )


def disconnected(client: Client) -> Client:
    return client._replace(link="down", awaits="")


def ask(client: Client, kept: int, tokens: Tokens, limit: int, while_away: bool) -> Said:
    """A question behind the first ``kept`` committed tokens."""
    client = _cut(client, kept)._replace(supplied=tokens, limit=limit, while_away=while_away)
    return _prompt(client) if client.link == "up" else (client, ())


def cancel(client: Client) -> Said:
    client = _cut(client, len(client.committed))
    return client, ((Cancel(client.epoch, client.shared),) if client.link == "up" else ())


def propose(client: Client, tentative: Tokens) -> Said:
    client = client._replace(tentative=tentative, awaits="draft")
    return client, (Draft(client.epoch, len(client.committed), tentative),)


def send_unsolicited(client: Client, tokens: Tokens) -> Said:
    """The device drafts beside a server that goes on by itself."""
    return client, (Unsolicited(client.epoch, len(client.committed), tokens),)


def grant_credit(client: Client) -> Said:
    """The server goes on by itself."""
    return _credit(client, len(client.known) + WINDOW)


def revoke_credit(client: Client) -> Said:
    """The device drafts again, after CreditRevoked arrived."""
    return _credit(client._replace(awaits="revocation"), 0)


def receive(client: Client, frame: Down) -> Said:
    if isinstance(frame, Welcome):
        return _welcomed(client, frame)
    if isinstance(frame, Rows):
        return _rows(client, frame), ()
    if isinstance(frame, Fault):
        return _fault(client, frame)
    if frame.epoch != client.epoch or not client.limit:
        return client, ()
    if isinstance(frame, CreditRevoked):
        stands = client.awaits == "revocation" and frame.serial == client.serial
        return client._replace(awaits="" if stands else client.awaits), ()
    return _verdict(client, frame)


def _welcomed(client: Client, welcome: Welcome) -> Said:
    goes_on = (
        welcome.token == client.token and welcome.epoch == client.epoch and welcome.agreed == len(client.known)
    ) and client.limit > 0
    ours = client.epoch
    client = client._replace(
        link="up",
        token=welcome.token,
        connection=max(client.connection, welcome.connection),
        epoch=max(client.epoch, welcome.epoch),
        shared=min(welcome.agreed, len(client.committed)),
    )
    if goes_on:
        # The server has the prompt: what follows is an answer to it.
        return client._replace(
            committed=client.known, supplied=(), shared=len(client.known), awaits="draft" if welcome.news else ""
        ), ()
    if client.limit:
        return _prompt(client._replace(epoch=client.epoch + 1, credit=0))
    if welcome.epoch == ours or not welcome.epoch:
        return client, ()
    client = _cut(client, len(client.committed))
    return client, (Cancel(client.epoch, client.shared),)


def _prompt(client: Client, base: int | None = None) -> Said:
    """With what the server lacks; from ``base`` on where it was asked before."""
    base = client.shared if base is None else base
    client = client._replace(awaits="prompt", asked_from=base)
    rows = len(client.rows)
    return client, (Prompt(client.epoch, base, client.known[base:], client.limit, rows, client.while_away),)


def _verdict(client: Client, verdict: Verdict) -> Said:
    reached = len(client.known)
    if verdict.base > reached:
        raise WrongError(f"a verdict at {verdict.base}, behind {reached} tokens")
    if client.supplied and verdict.base < reached:
        raise WrongError("a verdict on what lies before the prompt")
    overlap, new = verdict.tokens[: reached - verdict.base], verdict.tokens[reached - verdict.base :]
    if overlap != client.committed[verdict.base : verdict.base + len(overlap)]:
        raise WrongError("decided twice, and differently")
    if not new:
        return client, ()
    if not client.awaits and client.credit <= len(client.committed) and not client.repeated:
        raise WrongError("a verdict without a request")
    agreed = 0
    while agreed < min(len(new), len(client.tentative)) and new[agreed] == client.tentative[agreed]:
        agreed += 1
    rest = client.tentative[agreed:] if agreed == len(new) else ()
    awaits = client.awaits if client.awaits == "revocation" else ""
    known = client.known + new
    client = client._replace(committed=known, supplied=(), tentative=rest, awaits=awaits, shared=len(known))
    if verdict.finished:
        client = client._replace(limit=0, tentative=(), credit=0, awaits="")
    return client, ()


def _rows(client: Client, frame: Rows) -> Client:
    """Rows of an earlier epoch hold up to where a later one began."""
    end = min((base for epoch, base in client.cuts if epoch > frame.epoch), default=frame.start + len(frame.rows))
    rows = frame.rows[: max(0, end - frame.start)]
    if not rows:
        return client
    if frame.start > len(client.rows):
        raise WrongError("rows are missing between")
    held = client.rows[: frame.start] + rows
    return client._replace(rows=held + client.rows[len(held) :])


def _fault(client: Client, fault: Fault) -> Said:
    if fault.code == "REPLACED":
        return client._replace(link="refused"), ()
    if fault.code == "OUT_OF_SYNC":
        raise WrongError("the server lacks what it had")
    # The engine failed: what was asked for is asked for again.
    client = client._replace(repeated=True)
    again: Said = (client, ())
    if client.awaits == "prompt":
        again = _prompt(client, client.asked_from)
    elif client.awaits == "draft":
        again = propose(client, client.tentative)
    if not client.limit or not (client.credit or client.awaits == "revocation"):
        return again
    return client, (*again[1], Credit(client.epoch, client.credit, client.serial))


def _credit(client: Client, position: int) -> Said:
    client = client._replace(credit=position, serial=client.serial + 1)
    return client, (Credit(client.epoch, client.credit, client.serial),)


def _cut(client: Client, kept: int) -> Client:
    """A new epoch, in which no answer runs yet."""
    epoch = client.epoch + 1
    return client._replace(
        committed=client.committed[:kept],
        supplied=(),
        tentative=(),
        limit=0,
        epoch=epoch,
        rows=client.rows[:kept],
        cuts=(*client.cuts, (epoch, kept)),
        shared=min(client.shared, kept),
        awaits="",
        credit=0,
    )
