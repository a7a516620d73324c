"""What clients do that come, go, flood, hang and lie. Each actor is one visit, driven by a seeded generator."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from soak.raw import Target, connected, decode_request, upgraded
from support.server.attacks import BINARY, CONT, MEMBERS, PING, STRANGERS, TEXT, Attack, Victim, frame, keep_up
from support.server.in_memory import draft, prompt

#: Seconds after which a visit is broken off.
LONGEST_VISIT_S = 20.0
#: Resume tokens that visitors leave behind for others.
_KEPT_TOKENS = 50

Actor = Callable[[Target, random.Random, list[str]], Awaitable[None]]


def _tokens(target: Target, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, target.vocabulary) for _ in range(count)]


def _tree(target: Target, rng: random.Random, count: int) -> tuple[list[int], list[int]]:
    return _tokens(target, rng, count), [rng.randint(0, index) for index in range(count)]


async def visit(target: Target, rng: random.Random, left: list[str]) -> None:
    """A session: a prompt, some drafts; sometimes one that another connection had."""
    async with upgraded(target) as raw:
        resumed = rng.choice(left) if left and rng.random() < 0.4 else ""
        token = await raw.greet(target.hello(resumed, rng.choice([0, 1, 2])))
        left.append(token)
        del left[:-_KEPT_TOKENS]
        tokens = _tokens(target, rng, rng.choice([4, 40, target.context // 2]))
        await raw.send(prompt(rng.randint(1, 5), 0, tokens, most=60))
        for _ in range(rng.randint(0, 12)):
            verdict = await raw.verdict()
            if verdict is None or verdict.finish:
                break
            nodes, parents = _tree(target, rng, rng.randint(0, 60))
            base_len = verdict.base_len + len(verdict.tokens)
            await raw.send(draft(verdict.epoch, base_len, nodes, parents))
        if rng.random() < 0.5:
            await raw.send(wire.ClientMessage(bye=wire.Bye()))


async def flood(target: Target, rng: random.Random, left: list[str]) -> None:
    """Frames without awaiting a verdict."""
    async with upgraded(target) as raw:
        await raw.greet(target.hello())
        for epoch in range(1, 200):
            await raw.send(prompt(epoch, 0, _tokens(target, rng, 100)))


async def hang(target: Target, rng: random.Random, left: list[str]) -> None:
    """All memory rows again and again, never read."""
    async with upgraded(target) as raw:
        await raw.send(target.hello())
        await raw.send(prompt(1, 0, _tokens(target, rng, target.context // 2)))
        for epoch in range(2, 12):
            await raw.send(prompt(epoch, 1, _tokens(target, rng, target.context // 2)))
            await asyncio.sleep(rng.random())


async def lie(target: Target, rng: random.Random, left: list[str]) -> None:
    """Frames that are wrong in one way each."""
    some = _tokens(target, rng, 20)
    lies: list[bytes] = [
        frame(TEXT, b"hello"),
        frame(BINARY, rng.randbytes(rng.randint(0, 300))),
        frame(BINARY, bytes(70_000)),
        frame(BINARY, wire.ClientMessage().SerializeToString()),
        *(
            frame(BINARY, message.SerializeToString())
            for message in (
                target.hello(),
                prompt(2, 10**9, some),
                prompt(2, 0, []),
                prompt(2, 0, [2**32 - 1]),
                prompt(2, 0, _tokens(target, rng, target.context + 1)),
                prompt(2**63, 0, some, rows_from=2**63),
                draft(3, 5, some),
                draft(1, 10**12, some),
                draft(1, 0, some),
                draft(1, 21, some, parents=[7] * 20),
                draft(1, 21, some, parents=[0]),
                draft(1, 21, _tokens(target, rng, 2000)),
                draft(0, 21, some),
                draft(1, 21, some),
                wire.ClientMessage(cancel=wire.Cancel(epoch=9, base_len=10**9)),
            )
        ),
    ]
    async with upgraded(target) as raw:
        await raw.greet(target.hello(row_encoding=rng.choice([0, 1, 2, 7])))
        await raw.send(prompt(1, 0, some))
        for wrong in rng.sample(lies, 8):
            await raw.write(wrong)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(raw.receive(), 0.2)


async def huge_drafts(target: Target, rng: random.Random, left: list[str]) -> None:
    """The largest trees, one behind the other."""
    async with upgraded(target) as raw:
        await raw.greet(target.hello())
        await raw.send(prompt(1, 0, _tokens(target, rng, 8)))
        for _ in range(6):
            verdict = await raw.verdict()
            if verdict is None or verdict.finish:
                return
            nodes, parents = _tree(target, rng, min(1024, target.context))
            await raw.send(draft(1, verdict.base_len + len(verdict.tokens), nodes, parents))


async def leave_in_a_prompt(target: Target, rng: random.Random, left: list[str]) -> None:
    async with upgraded(target) as raw:
        await raw.greet(target.hello())
        await raw.send(prompt(1, 0, _tokens(target, rng, target.context - 1)))
        await asyncio.sleep(rng.random() * 0.05)


async def hang_up_on_a_stream(target: Target, rng: random.Random, left: list[str]) -> None:
    async with connected(target) as raw:
        tokens = _tokens(target, rng, rng.choice([10, target.context // 2]))
        await raw.write(decode_request(tokens, stream=rng.random() < 0.8))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(raw.reader.read(rng.choice([1, 500, 5000])), rng.random() * 2)


async def never_read_a_stream(target: Target, rng: random.Random, left: list[str]) -> None:
    async with connected(target) as raw:
        await raw.write(decode_request(_tokens(target, rng, 4), stream=True) * 3)
        await asyncio.sleep(rng.random() * 10)


async def slow(target: Target, rng: random.Random, left: list[str]) -> None:
    """A header or a body, byte by byte."""
    whole = decode_request(_tokens(target, rng, 50))
    begun = rng.choice([0, whole.index(b"\r\n\r\n") + 4])
    async with connected(target) as raw:
        await raw.write(whole[:begun])
        for byte in whole[begun:]:
            await raw.write(bytes([byte]))
            await asyncio.sleep(0.1)


async def idle(target: Target, rng: random.Random, left: list[str]) -> None:
    async with connected(target):
        await asyncio.sleep(rng.random() * 15)


async def ping(target: Target, rng: random.Random, left: list[str]) -> None:
    """Pings without reading what comes back."""
    async with upgraded(target) as raw:
        for _ in range(200):
            await raw.write(frame(PING, bytes(125)) * 50)


async def half_messages(target: Target, rng: random.Random, left: list[str]) -> None:
    hello = target.hello().SerializeToString()
    async with upgraded(target) as raw:
        await raw.write(frame(BINARY, hello[:5], fin=False))
        for _ in range(rng.randint(0, 2000)):
            await raw.write(frame(CONT, b"", fin=False))
        await raw.write(frame(BINARY, hello)[: rng.randint(1, 20)])
        await asyncio.sleep(rng.random())


async def change_their_mind(target: Target, rng: random.Random, left: list[str]) -> None:
    """Long prompts, each overtaken by another one, a Cancel, or a second connection."""
    async with upgraded(target) as raw:
        token = await raw.greet(target.hello())
        for epoch in range(1, 20, 2):
            await raw.send(prompt(epoch, 0, _tokens(target, rng, target.context // 2)))
            await asyncio.sleep(rng.random() * 0.05)
            await raw.send(wire.ClientMessage(cancel=wire.Cancel(epoch=epoch + 1)))
        await raw.send(prompt(50, 0, _tokens(target, rng, target.context // 2)))
        async with upgraded(target) as other:
            await other.greet(target.hello(token))
            await other.send(prompt(60, 0, _tokens(target, rng, 5)))
            await other.verdict()


async def not_http(target: Target, rng: random.Random, left: list[str]) -> None:
    async with connected(target) as raw:
        choices = [rng.randbytes(200), b"GET /" + b"a" * 70_000, b"GET /healthz HTTP/1.1\r\nHost: evil\r\n\r\n"]
        choices += [b"POST /v1/decode HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n[1,2,3]]}"]
        await raw.write(rng.choice(choices))
        await raw.reader.read(1000)


def _attacker(name: str, run: Attack) -> Actor:
    async def attack(target: Target, rng: random.Random, left: list[str]) -> None:
        victim, seconds = Victim(target.port, target.fingerprints), rng.uniform(1, LONGEST_VISIT_S / 2)
        await asyncio.to_thread(keep_up, run, victim, seconds)

    attack.__name__ = name
    return attack


ACTORS: Sequence[tuple[Actor, int]] = (
    (visit, 6),
    (flood, 2),
    (hang, 2),
    (lie, 3),
    (huge_drafts, 2),
    (leave_in_a_prompt, 3),
    (hang_up_on_a_stream, 3),
    (never_read_a_stream, 1),
    (slow, 1),
    (idle, 2),
    (ping, 1),
    (half_messages, 1),
    (change_their_mind, 2),
    (not_http, 1),
    *((_attacker(name, run), 1) for name, run in {**STRANGERS, **MEMBERS}.items()),
)


class Crowd:
    """So many visitors at a time, until it is sent home.

    Attributes:
        visits: how many of each actor there were.
    """

    def __init__(self, target: Target, seed: int, size: int = 32) -> None:
        self._target, self._seed, self._size = target, seed, size
        self._left: list[str] = []
        self.visits: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(
            *(self._one_after_the_other(random.Random(f"{self._seed}.{n}")) for n in range(self._size))
        )

    async def _one_after_the_other(self, rng: random.Random) -> None:
        actors, weights = zip(*ACTORS, strict=True)
        while True:
            (actor,) = rng.choices(actors, weights)
            self.visits[actor.__name__] += 1
            # Some die in the middle of whatever they do.
            longest = rng.random() if rng.random() < 0.2 else LONGEST_VISIT_S
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, TimeoutError, asyncio.LimitOverrunError):
                await asyncio.wait_for(actor(self._target, rng, self._left), longest)
            await asyncio.sleep(0.05 * rng.random())  # also after a refusal
