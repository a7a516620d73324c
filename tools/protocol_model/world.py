"""A device, a verifier and the connections between them; everything that can happen next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol_model import client as device
from protocol_model import server as verifier
from protocol_model.client import Client
from protocol_model.frames import (
    Cancel,
    Credit,
    Down,
    Draft,
    Hello,
    Prompt,
    Tokens,
    Unsolicited,
    Up,
    Welcome,
    choice,
    plain,
    row,
)
from protocol_model.server import Session


class Connection(NamedTuple):
    """Frames under way. The older ones of a connection that the device has dropped may still arrive."""

    number: int
    up: tuple[Up, ...] = ()
    down: tuple[Down, ...] = ()
    dropped: bool = False  # by the device
    greeted: bool = False  # the server took its Hello


class Bounds(NamedTuple):
    """How often things may happen."""

    drops: int = 1
    server_restarts: int = 0
    client_restarts: int = 0
    failures: int = 0
    cancels: int = 0
    questions: int = 1
    credits: int = 0
    unsolicited: int = 0  # drafts, and how often one overtakes others or comes twice
    answer: int = 2  # tokens
    while_away: bool = True


class World(NamedTuple):
    left: Bounds
    client: Client = Client()
    stored: Client = Client()
    sessions: tuple[Session, ...] = ()
    begun: int = 0  # sessions so far
    connections: tuple[Connection, ...] = ()
    opened: int = 0  # so far
    asked: Tokens = ()  # the conversation up to the answer that runs, or ran last
    ends: int = 0


Step = tuple[str, World]


def start(bounds: Bounds) -> World:
    return _ask(World(bounds))


def steps(world: World) -> Iterator[Step]:
    """What may happen next: what has to, then what goes wrong or is wished."""
    yield from necessary(world)
    left, client = world.left, world.client
    if left.drops:
        fewer = world._replace(left=left._replace(drops=left.drops - 1))
        if client.link != "down":
            yield "the device drops the link", _drop(fewer)
        for connection in world.connections:
            yield f"connection {connection.number} is reset", _reset(fewer, connection)
    if left.server_restarts and world.sessions:
        fewer = world._replace(left=left._replace(server_restarts=left.server_restarts - 1), sessions=())
        for connection in world.connections:
            fewer = _reset(fewer, connection)
        yield "the verifier starts anew", fewer
    if left.client_restarts:
        fewer = world._replace(left=left._replace(client_restarts=left.client_restarts - 1))
        gone = fewer if client.link == "down" else _drop(fewer)
        yield "the program starts anew", gone._replace(client=world.stored._replace(rows=(), link="down", awaits=""))
        yield (
            "the program stores its state and starts anew",
            gone._replace(client=device.disconnected(client)._replace(rows=()), stored=client),
        )
    for session in world.sessions:
        if verifier.may_go_on_unheard(session):
            yield "the server goes on unheard", _kept(world, verifier.go_on_unheard(session))
        if left.failures and session.work:
            fewer = world._replace(left=left._replace(failures=left.failures - 1))
            yield "the engine fails", _down(fewer, *verifier.fail_step(session))
    if left.cancels and client.limit:
        fewer = world._replace(left=left._replace(cancels=left.cancels - 1))
        yield "the user stops the answer", _said(fewer, device.cancel(client))
    if left.questions and not client.limit:
        yield "the user asks again", _ask(world)
    if left.credits and client.link == "up" and client.limit and not client.credit and client.awaits != "revocation":
        fewer = world._replace(left=left._replace(credits=left.credits - 1))
        yield "the server is to go on", _said(fewer, device.grant_credit(client))
    if client.credit and client.link == "up" and not client.awaits:
        yield "the device revokes the credit", _said(world, device.revoke_credit(client))
    for session in world.sessions:
        if session.work is None and session.pushes and verifier.newest_draft(session):
            yield "the server goes on without the draft", _kept(world, verifier.go_on(session, drafted=False))
    if left.unsolicited:
        fewer = world._replace(left=left._replace(unsolicited=left.unsolicited - 1))
        if client.may_send_unsolicited:
            text = plain(client.committed, len(client.committed) + 2)[len(client.committed) :]
            yield "a right draft, unasked", _said(fewer, device.send_unsolicited(client, text))
            half = (text[0], 1 - text[1])
            yield "a draft that goes wrong, unasked", _said(fewer, device.send_unsolicited(client, half))
        for connection in world.connections:
            for at, frame in enumerate(connection.up):
                if isinstance(frame, Unsolicited):
                    others = connection.up[:at] + connection.up[at + 1 :]
                    yield "a draft comes twice", _with(fewer, connection._replace(up=(*connection.up, frame)))
                    if at:
                        yield "a draft overtakes", _with(fewer, connection._replace(up=(frame, *others)))
    if client.may_propose:
        wrong = 1 - choice(client.committed)
        yield "a wrong draft", _said(world, device.propose(client, (wrong,)))
        yield "an empty draft", _said(world, device.propose(client, ()))


def necessary(world: World) -> Iterator[Step]:
    """What happens by itself, in the order in which a quiet run takes it."""
    client = world.client
    if client.link == "down":
        yield "connect", _connect(world)
    for connection in world.connections:
        if connection.up:
            yield f"to the server: {connection.up[0]}", _arrive(world, connection)
        if connection.down and not connection.dropped:
            yield f"to the device: {connection.down[0]}", _deliver(world, connection)
    for session in world.sessions:
        if session.work is not None:
            for pushed in (1, 2) if session.work.pushed and not session.work.draft else (1,):
                yield "the step ends", _down(world, *verifier.end_step(session, pushed))
        elif session.pushes:
            yield "the server goes on", _kept(world, verifier.go_on(session))
        if verifier.rows_due(session):
            yield "rows", _down(world, *verifier.send_rows(session))
    if client.credit and client.credit <= len(client.committed) and client.link == "up" and not client.awaits:
        yield "more credit", _said(world, device.grant_credit(client))
    if client.may_propose:
        yield "a right draft", _said(world, device.propose(client, (choice(client.committed),)))


def problem(world: World) -> str:
    """What must never be, in words; empty where all is well."""
    client = world.client
    expected = plain(world.asked, world.ends)
    if client.committed != expected[: len(client.committed)]:
        return f"committed {client.committed}, the target would write {expected}"
    if client.rows != tuple(row(client.known, at) for at in range(len(client.rows))):
        return "rows of other tokens"
    if client.link == "refused":
        return "refused, although there is no other client"
    for session in world.sessions:
        if session.kept and (session.kept.epoch, session.kept_of) != (session.epoch, session.attached):
            return "a draft of another epoch or connection"
    return ""


def done(world: World) -> bool:
    """The answer is complete, or was stopped."""
    client = world.client
    return not client.limit and client.link == "up" and not any(c.up or c.down for c in world.connections)


def _ask(world: World) -> World:
    left, client = world.left, world.client
    tokens = (10 + left.questions,)
    kept = len(client.committed)
    asked = client.committed[:kept] + tokens
    ends = len(asked) + left.answer
    world = world._replace(left=left._replace(questions=left.questions - 1), asked=asked, ends=ends)
    return _said(world, device.ask(client, kept, tokens, ends, left.while_away))


def _connect(world: World) -> World:
    client = device.connect(world.client)
    number = world.opened + 1
    stored = client._replace(link="down")
    connection = Connection(number, (device.hello(client),))
    return world._replace(client=client, stored=stored, opened=number, connections=(*world.connections, connection))


def _drop(world: World) -> World:
    """What was on its way to the device is lost; what it sent may still arrive."""
    *others, newest = world.connections
    kept = (newest._replace(dropped=True, down=()),) if newest.up else ()
    world = world._replace(client=device.disconnected(world.client), connections=(*others, *kept))
    return world if kept else _left(world, newest.number)


def _reset(world: World, connection: Connection) -> World:
    others = tuple(other for other in world.connections if other.number != connection.number)
    client = world.client if connection.dropped else device.disconnected(world.client)
    return _left(world._replace(client=client, connections=others), connection.number)


def _left(world: World, number: int) -> World:
    """The server sees that a connection is gone."""
    session = _attached(world, number)
    return world if session is None else _kept(world, verifier.leave(session))


def _arrive(world: World, connection: Connection) -> World:
    frame, up = connection.up[0], connection.up[1:]
    world = _with(world, connection._replace(up=up))
    if isinstance(frame, Hello):
        world = _greet(world, connection.number, frame)
    else:
        session = _attached(world, connection.number)
        if session is not None:
            if isinstance(frame, Unsolicited):
                world = _kept(world, verifier.keep(session, frame))
            else:
                assert isinstance(frame, Prompt | Draft | Credit | Cancel)
                world = _down(world, *verifier.receive(session, frame))
    return _gone(world, connection.number)


def _greet(world: World, number: int, hello: Hello) -> World:
    known = next((session for session in world.sessions if session.token == hello.token), None)
    if known is None:
        begun = world.begun + 1
        session = Session(begun, connection=hello.connection, attached=number)
        world = world._replace(begun=begun, sessions=(*world.sessions, session))
        return _answer(world, number, (Welcome(begun, hello.connection, 0, 0, False),))
    session, out = verifier.greet(known, hello, number)
    if session.attached != number:
        return _answer(world, number, out)
    world = _down(world, session, out)
    for other in world.connections:
        if other.number == known.attached:
            world = _reset(world, other)
    return world


def _deliver(world: World, connection: Connection) -> World:
    frame, down = connection.down[0], connection.down[1:]
    return _said(_with(world, connection._replace(down=down)), device.receive(world.client, frame))


def _gone(world: World, number: int) -> World:
    """A dropped connection from which nothing can come any more is closed at the server too."""
    for connection in world.connections:
        if connection.number == number and connection.dropped and not connection.up:
            return _reset(world, connection)
    return world


def _with(world: World, connection: Connection) -> World:
    return world._replace(
        connections=tuple(connection if c.number == connection.number else c for c in world.connections)
    )


def _attached(world: World, number: int) -> Session | None:
    return next((session for session in world.sessions if session.attached == number), None)


def _kept(world: World, session: Session) -> World:
    return world._replace(
        sessions=tuple(session if other.token == session.token else other for other in world.sessions)
    )


def _down(world: World, session: Session, frames: tuple[Down, ...]) -> World:
    return _answer(_kept(world, session), session.attached, frames)


def _answer(world: World, number: int, frames: tuple[Down, ...]) -> World:
    for connection in world.connections:
        if connection.number == number and not connection.dropped:
            return _with(world, connection._replace(down=connection.down + frames))
    return world


def _said(world: World, said: device.Said) -> World:
    client, frames = said
    world = world._replace(client=client)
    if not frames:
        return world
    newest = world.connections[-1]
    return _with(world, newest._replace(up=newest.up + frames))
