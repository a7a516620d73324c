"""One question over one connection, and what the answer cost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from moa_bench.link import LinkProfile
from moa_bench.link.background import BackgroundLink, background_link
from moa_bench.network.answer import Answer, Mode, Turn
from moa_bench.verifier import Verifier
from moa_runtime.errors import MoaError
from moa_runtime.transport import Endpoint

_POLL_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """An answer with what it cost.

    Attributes:
        identical: whether its tokens are those that the target alone writes.
        passes: of the target, those over the prompt included.
        bytes_up, bytes_down: through the link emulator, with the framing of HTTP or WebSocket, without that
            of TCP; without an emulator, what the client counts, without any framing. Connecting is left out.
        in_rounds: see :class:`moa_bench.network.answer.Mode`.
    """

    answer: Answer
    identical: bool
    passes: int
    bytes_up: int
    bytes_down: int
    in_rounds: bool


def ask(verifier: Verifier, profile: LinkProfile | None, mode: Mode, turn: Turn, timeout_s: float) -> Outcome:
    """Ask through a link of its own, so that every answer finds the same outages at the same times.

    Args:
        profile: of the link; None for the way there is.

    Raises:
        VerifierGoneError: the verifier died.
        MoaError: it refused, or the answer took longer than ``timeout_s``.
    """
    with ExitStack() as stack:
        link, endpoint = None, verifier.endpoint
        if profile is not None:
            link = stack.enter_context(background_link(profile, *verifier.host_and_port))
            endpoint = through(link, endpoint)
        passes = verifier.forwards()
        answer, up, down = asyncio.run(watched(_ask(endpoint, link, mode, turn), verifier, timeout_s))
        passes = verifier.forwards() - passes
    return Outcome(answer, answer.tokens == list(turn.reference), passes, up, down, mode.in_rounds)


def through(link: BackgroundLink, endpoint: Endpoint) -> Endpoint:
    """The verifier at ``endpoint``, reached over an emulated link."""
    address = urlsplit(endpoint.address)._replace(netloc=f"127.0.0.1:{link.port}")
    return replace(endpoint, url=address.geturl())


async def _ask(endpoint: Endpoint, link: BackgroundLink | None, mode: Mode, turn: Turn) -> tuple[Answer, int, int]:
    """The answer, and bytes up and down."""
    async with mode.connect(endpoint, turn) as send:
        if link is None:
            answer = await send()
            return answer, answer.payload_up, answer.payload_down
        up, down = link.bytes_up, link.bytes_down
        return await send(), link.bytes_up - up, link.bytes_down - down


async def watched(work: Coroutine[Any, Any, T], verifier: Verifier, timeout_s: float) -> T:
    """The result of ``work``, unless it takes too long or the verifier dies: a client would wait for it for ever."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_until_gone(verifier))
    try:
        done, _ = await asyncio.wait({working, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise MoaError(
                f"an answer was not complete after {timeout_s:g} s: ask for fewer tokens, or raise --answer-timeout"
            )
        if working not in done:
            watching.result()
        if isinstance(working.exception(), MoaError):
            verifier.status()  # if it is gone, that is the better explanation
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(verifier: Verifier) -> NoReturn:
    """Raises VerifierGoneError once the verifier takes no connections."""
    while True:
        await asyncio.sleep(_POLL_S)
        try:
            # No more than that: a request would take time from the answer that is measured.
            _, writer = await asyncio.open_connection(*verifier.host_and_port)
        except OSError:
            verifier.status()
        else:
            writer.close()
