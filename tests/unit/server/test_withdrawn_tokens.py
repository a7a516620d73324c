"""A token that leaves the token file: all of its work ends when the file is read again, whatever it waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import digest
from moa_server.connection import CloseReason
from moa_server.settings import Settings
from support.memory_link import ClientEnd
from support.server.in_memory import (
    PROMPT,
    Served,
    asked,
    credit,
    hello,
    in_served,
    like,
    own,
    prompt,
    receive,
    resumed,
    send,
    verdict_of,
)
from support.toy_engine import ToyEngine, plain

WITHDRAWN = CloseReason.WITHDRAWN.value


def alices(scenario: Any) -> Callable[..., None]:
    """Make a test of a scenario for Alice, whose token is in ``served.file``, as is Bob's. A parameter ``budget`` names
    a rate that both hardly have."""

    def test(tmp_path, **fixtures: Any) -> None:
        limits = {fixtures["budget"]: 0.01} if "budget" in fixtures else {}
        file = tmp_path / "tokens.json"
        write(file, "alice", "bob", **limits)

        async def run(served: Served) -> None:
            served.file = file  # type: ignore[attr-defined]
            be(served, "alice")
            await scenario(served, **fixtures)

        in_served(run, Settings(token_file=file))

    return like(scenario, test, "tmp_path")


def write(file: Any, *names: str, **budget: float) -> None:
    """Each name has the token ``name-token``."""
    entries = [{"name": name, "sha256": digest(f"{name}-token"), **budget} for name in names]
    file.write_text(json.dumps({"tokens": entries}))
    file.chmod(0o600)


def be(served: Served, name: str) -> None:
    """New connections and streams are this bearer's."""
    bearer = served.verifier.authenticator.authenticate(f"Bearer {name}-token")
    assert bearer is not None
    served.bearer = bearer


def withdraw(served: Any) -> float:
    """Alice's token leaves the file; return the time."""
    write(served.file, "bob")
    served.verifier.authenticator.reload()
    return asyncio.get_running_loop().time()


async def ended(served: Served, end: ClientEnd) -> list[wire.ServerMessage]:
    """All that comes before the fault that says why the connection ends; it is the last message."""
    messages = [wire.ServerMessage.FromString(frame) async for frame in end]
    last = messages.pop().fault
    assert (last.code, last.text, last.epoch) == (wire.FAULT_CODE_PROTOCOL, WITHDRAWN, 0)
    assert served.link.close_codes == [1008]
    return messages


async def nothing_is_left(served: Served) -> None:
    """No step begins any more, and nothing is held."""
    steps, verifier = len(served.engine.steps), served.verifier
    await asyncio.sleep(60)
    assert len(served.engine.steps) <= steps and not served.engine.sequences_open and not verifier.plain.running
    assert not len(verifier.worker) and not len(verifier.background_answers) and not len(verifier.store)


def at_once(began: float) -> bool:
    """Whether no more time has passed than a step takes."""
    return asyncio.get_running_loop().time() - began < 0.1


# -- sessions ----------------------------------------------------------------------------------------


async def stream_on_credit(served: Served) -> ClientEnd:
    end, _ = await served.session()
    await send(end, asked(900), credit(900))
    for _ in range(5):
        await verdict_of(end)
    return end


async def silent_answer(served: Served) -> ClientEnd:
    end = await answer(served)
    while not len(served.verifier.background_answers):
        await asyncio.sleep(0.1)
    return end


async def answer(served: Served) -> ClientEnd:
    return (await served.answering(asked(900, while_away=True)))[0]


async def silent_connection(served: Served) -> ClientEnd:
    end = await served.link.connect("")
    await asyncio.sleep(1)
    return end


async def greeted_connection(served: Served) -> ClientEnd:
    return (await served.session())[0]


async def prompt_in_prefill(served: Served) -> ClientEnd:
    served.engine.slow_s = 50.0
    end, _ = await served.session()
    await send(end, prompt(1, 0, [7] * 900))
    await served.steps(1)
    return end


UNDER_WAY = (stream_on_credit, silent_answer, answer, silent_connection, greeted_connection, prompt_in_prefill)


@alices
@pytest.mark.parametrize("begin", UNDER_WAY, ids=lambda begin: begin.__name__)
async def test_a_connection_ends_with_all_its_work(served: Served, begin):
    end = await begin(served)
    began = withdraw(served)
    late = await ended(served, end)
    assert at_once(began) and len(late) <= 2  # what was under way to the client
    served.engine.slow_s = 0.0
    await nothing_is_left(served)


@alices
async def test_a_connection_whose_upgrade_was_allowed_before_ends(served: Served):
    withdraw(served)
    end = await served.link.connect("")
    await send(end, hello())
    assert not await ended(served, end)
    await nothing_is_left(served)


@alices
@pytest.mark.parametrize("budget", ["prefill_tokens_per_second", "frames_per_second"])
async def test_a_frame_that_waits_for_its_budget_is_dropped(served: Served, budget):
    end, _ = await served.session()
    for epoch in range(1, 8):
        await send(end, prompt(epoch, 0, [epoch] * 90))
    await asyncio.sleep(1)
    began = withdraw(served)
    await ended(served, end)
    assert at_once(began)
    await nothing_is_left(served)


@alices
async def test_conversations_and_work_of_others_continue(served: Served):
    await served.left(4)
    be(served, "bob")
    token, _ = await served.left(4)
    bobs, _ = await served.session()
    await send(bobs, asked(30), credit(900))
    stream = served.stream([5], 30)
    be(served, "alice")
    end, _ = await served.session()
    withdraw(served)
    await ended(served, end)
    await stream.answering
    assert stream.tokens == plain(ToyEngine(), [5], 30) and not stream.error
    tokens: list[int] = []
    while not (verdict := await verdict_of(bobs)).finish:
        tokens += verdict.tokens
    assert [*PROMPT, *tokens, *verdict.tokens] == own(30)
    assert len(served.verifier.store) == served.engine.sequences_open == 2
    be(served, "bob")
    end = await served.link.connect("")
    await send(end, resumed(token, PROMPT))
    assert (await receive(end)).welcome.resume_token == token


@alices
async def test_a_name_with_a_new_token_begins_anew(served: Any):
    token, _ = await served.left(900, while_away=True)
    await served.steps(5)
    assert len(served.verifier.background_answers) == 1
    served.file.write_text(served.file.read_text().replace(digest("alice-token"), digest("new-token")))
    served.verifier.authenticator.reload()
    await nothing_is_left(served)
    be(served, "new")
    assert served.bearer.name == "alice"
    end = await served.link.connect("")
    await send(end, resumed(token, PROMPT))
    assert (await receive(end)).welcome.resume_token != token


# -- plain decoding ----------------------------------------------------------------------------------


@alices
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_decoding_ends(served: Served, streamed):
    served.engine.slow_s = 0.0 if streamed else 50.0
    stream = served.stream([7], 900, streamed)
    await served.steps(5 if streamed else 1)
    began = withdraw(served)
    await stream.answering
    assert at_once(began) and (stream.status, stream.error) == (200 if streamed else 401, WITHDRAWN)
    assert len(stream.tokens) <= 5


@alices
@pytest.mark.parametrize("budget", ["prefill_tokens_per_second", "frames_per_second"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_that_waits_for_its_budget_ends(served: Served, budget, streamed):
    await served.stream([7] * 90, 1).answering
    waiting = served.stream([7], 5, streamed)
    await asyncio.sleep(1)
    assert not waiting.answering.done()
    began = withdraw(served)
    await waiting.answering
    assert at_once(began) and waiting.error == WITHDRAWN and not waiting.tokens
    await nothing_is_left(served)


@alices
async def test_a_request_whose_body_is_still_coming_ends(served: Served):
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b'{"tokens": [', "more_body": True})
    request = Request({"type": "http", "method": "POST", "headers": []}, messages.get)
    answering = asyncio.create_task(served.verifier.plain.answer(request, served.bearer))
    await asyncio.sleep(1)
    withdraw(served)
    await asyncio.wait({answering}, timeout=0.1)
    assert answering.done() and answering.result().status_code == 401
