"""A verifier of the toy target on a virtual clock, with connections in memory."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.handshake import PROTOCOL_VERSION, digest
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.app import PlainDecodingEndpoint, Verifier
from moa_server.auth import Bearer
from moa_server.connection import Connection
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.edge.rate_limits import Budget
from moa_server.engine.base import Outcome, StepRequest
from moa_server.settings import Settings
from support.memory_link import ClientEnd, MemoryLink, ServerEnd
from support.toy_engine import PRINTS, ToyEngine, plain
from support.virtual_loop import run_virtually

SETTINGS = Settings(max_waiting_frames=8)
NO_BUDGET = Budget()
PROMPT = [7, 8, 9]


class Timed(ToyEngine):
    """A step takes 20 ms, and a millisecond for each token.

    Attributes:
        slow_s: what it takes besides.
    """

    slow_s = 0.0

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        tokens = [len(each.prefix) - self.held(each.sequence, each.prefix) + len(each.draft) for each in requests]
        self._delay_s = (self.slow_s + 0.02 + 0.001 * sum(tokens), 0.0)
        return await super().step(requests)


class Served:
    """A verifier of the toy without a network.

    Attributes:
        bearer: of new connections and streams.
        connections: all that there were, the newest last.
    """

    def __init__(self, settings: Settings, budget: Budget, drafts: ServerDrafting | None) -> None:
        self.engine = Timed()
        self.verifier = Verifier(self.engine, settings, drafts=drafts, clock=asyncio.get_running_loop().time)
        self.bearer = Bearer(budget=budget)
        self.connections: list[Connection] = []
        self.link = MemoryLink(self._serve)

    async def _serve(self, end: ServerEnd) -> None:
        self.connections.append(Connection(end, self.verifier, self.bearer))  # type: ignore[arg-type]
        await self.connections[-1].serve()

    async def session(self, token: str = "") -> tuple[ClientEnd, str]:
        """A greeted connection, and its resume token."""
        end = await self.link.connect("")
        await send(end, hello(token))
        return end, (await receive(end)).welcome.resume_token

    async def answering(self, *question: wire.ClientMessage) -> tuple[ClientEnd, str, list[int]]:
        """A session with the first token of an answer: its connection, resume token and tokens."""
        end, token = await self.session()
        await send(end, *question)
        return end, token, [*PROMPT, *(await verdict_of(end)).tokens]

    async def cut(self) -> None:
        """Lose all connections."""
        self.link.cut()
        await self.link.closed()

    async def left(self, most: int, while_away: bool = True) -> tuple[str, list[int]]:
        """A client asks, has its first token, and is gone: its resume token, and its tokens."""
        _, token, tokens = await self.answering(asked(most, while_away=while_away))
        await self.cut()
        return token, tokens

    def stream(self, tokens: Sequence[int], most: int, streamed: bool = True) -> Stream:
        return Stream(self, {"tokens": list(tokens), "max_new_tokens": most, "stream": streamed})

    async def steps(self, count: int) -> None:
        """Wait until this number of further steps has begun."""
        until = len(self.engine.steps) + count
        while len(self.engine.steps) < until:
            await asyncio.sleep(0.001)

    def lengths_since(self, step: int) -> list[list[int]]:
        """The prefixes of later steps, by their lengths."""
        return [sorted(len(request.prefix) for request in each) for each in self.engine.steps[step:]]

    async def end(self) -> None:
        await self.cut()
        await self.verifier.background_answers.close()
        await self.verifier.worker.close()


class Stream:
    """A request for plain decoding, the status, the tokens that came, and the error."""

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.status, self.error = 0, ""
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.answering = asyncio.create_task(self._answer(served.verifier.plain, served.bearer))

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def _answer(self, plain: PlainDecodingEndpoint, bearer: Bearer) -> None:
        scope = {"type": "http", "method": "POST", "headers": []}
        response = await plain.answer(Request(scope, self._messages.get), bearer)
        await response(scope, self._messages.get, self._send)  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        for line in message.get("body", b"").decode().split("\n\n"):
            event = json.loads(line.removeprefix("data: ") or "{}")
            self.tokens += [event["token"]] if "token" in event else []
            self.error += event.get("error", "")


def hello(
    resume_token: str = "", row_encoding: int = wire.ROW_ENCODING_INT8, prints: Fingerprints = PRINTS
) -> wire.ClientMessage:
    hello = wire.Hello(protocol_version=PROTOCOL_VERSION, resume=wire.Resume(token=resume_token))
    hello.fingerprints.CopyFrom(wire.Fingerprints(**asdict(prints)))
    hello.row_encoding = row_encoding  # type: ignore[assignment]
    return wire.ClientMessage(hello=hello)


def prompt(epoch: int, base_len: int, tokens: Sequence[int], rows_from: int = 0, most: int = 0) -> wire.ClientMessage:
    message = wire.Prompt(epoch=epoch, base_len=base_len, tokens=tokens, rows_from=rows_from)
    message.max_length = base_len + len(tokens) + most if most else 0
    return wire.ClientMessage(prompt=message)


def draft(epoch: int, base_len: int, tokens: Sequence[int], parents: Sequence[int] = ()) -> wire.ClientMessage:
    return wire.ClientMessage(draft=wire.Draft(epoch=epoch, base_len=base_len, tokens=tokens, parents=parents))


def asked(
    most: int = 0, tokens: Sequence[int] = PROMPT, *, while_away: bool = False, stamp: int = 0
) -> wire.ClientMessage:
    """The first question of a session, with the limit of its answer."""
    message = prompt(1, 0, list(tokens), most=most)
    message.prompt.while_away, message.prompt.stamp = while_away, stamp
    return message


def own(most: int, tokens: Sequence[int] = PROMPT) -> list[int]:
    """The prompt and the toy's answer."""
    return [*tokens, *plain(ToyEngine(), tokens, most)]


def credit(position: int, serial: int = 1, round_trip_us: int = 0) -> wire.ClientMessage:
    return wire.ClientMessage(
        credit=wire.Credit(epoch=1, position=position, serial=serial, round_trip_us=round_trip_us)
    )


async def send(end: ClientEnd, *messages: wire.ClientMessage) -> None:
    for message in messages:
        await end.send(message.SerializeToString())


async def receive(end: ClientEnd) -> wire.ServerMessage:
    return wire.ServerMessage.FromString(await end.down.get())


def resumed(token: str, tokens: Sequence[int], *, rows: int = 0, credit: int = 0) -> wire.ClientMessage:
    """The Hello of a client that has this number of tokens of the first answer."""
    message, mark = hello(), wire.Mark(length=len(tokens), digest=digest(tokens))
    resume = wire.Resume(token=token, connection=2, epoch=1, marks=[mark], answering=True, rows=rows, credit=credit)
    message.hello.resume.CopyFrom(resume)
    return message


async def verdict_of(end: ClientEnd) -> wire.Verdict:
    """The next verdict, past memory rows."""
    while (message := await receive(end)).WhichOneof("event") == "rows":
        pass
    assert message.WhichOneof("event") == "verdict", message
    return message.verdict


async def rows_of(end: ClientEnd, count: int) -> list[tuple[int, int]]:
    """Take the next memory rows, without other frames between: the start and number of rows of each frame."""
    frames: list[tuple[int, int]] = []
    while sum(size for _, size in frames) < count:
        message = await receive(end)
        assert message.WhichOneof("event") == "rows", message
        frames.append((message.rows.start, message.rows.count))
    return frames


async def silent(end: ClientEnd, seconds: float) -> bool:
    """Whether nothing comes for so long."""
    waiting = asyncio.create_task(receive(end))
    nothing = not (await asyncio.wait({waiting}, timeout=seconds))[0]
    waiting.cancel()
    await asyncio.wait({waiting})
    return nothing


def in_served(
    scenario: Any,
    settings: Settings = SETTINGS,
    budget: Budget = NO_BUDGET,
    drafts: Callable[[], ServerDrafting | None] = lambda: None,
) -> Any:
    """Run ``scenario(served)`` on a virtual clock; return its result."""

    async def run(loop: object) -> Any:
        served = Served(settings, budget, drafts())
        result = await asyncio.wait_for(scenario(served), 600)
        await served.end()
        return result

    return run_virtually(run)


def with_served(*options: Any, **named: Any) -> Callable[[Any], Callable[..., None]]:
    """Make a test of an async function whose first argument is a :class:`Served`; options of :func:`in_served`."""

    def decorate(scenario: Any) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            in_served(lambda served: scenario(served, **fixtures), *options, **named)

        return like(scenario, test)

    return decorate


def like(scenario: Any, test: Any, *fixtures: str) -> Any:
    """Give a test the name and marks of a scenario, and its parameters after the first besides these fixtures."""
    names = [*fixtures, *list(inspect.signature(scenario).parameters)[1:]]
    test.__name__, test.__doc__, test.__module__ = scenario.__name__, scenario.__doc__, scenario.__module__
    test.pytestmark = getattr(scenario, "pytestmark", [])
    test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
    return test
