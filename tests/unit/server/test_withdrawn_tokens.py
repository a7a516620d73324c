"""A token that leaves the token file: all of its work ends when the file is read again, whatever it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import digest
from moa_server.settings import Settings
from support.memory_link import ClientEnd
from support.server.in_memory import CLIENT, Served, Stream, in_served, receive, resumed, send, verdict_of
from support.server.raw import prompt
from support.toy_engine import ToyEngine, plain

PROMPT = [7, 8, 9]
WITHDRAWN = "the bearer token was withdrawn"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def write(file: Path, *names: str, **budget: float) -> None:
    """Each name has the token ``name-token``."""
    entries = [{"name": name, "sha256": digest(f"{name}-token"), **budget} for name in names]
    file.write_text(json.dumps({"tokens": entries}))
    file.chmod(0o600)


def be(served: Served, name: str) -> None:
    """New connections and streams are this bearer's."""
    bearer = served.verifier.authenticator.authenticate(f"Bearer {name}-token")
    assert bearer is not None
    served.bearer = bearer


def run(scenario: Callable[[Served], Any], file: Path, **budget: float) -> None:
    """Play it for Alice. Bob keeps his token."""
    write(file, "alice", "bob", **budget)

    async def alices(served: Served) -> None:
        be(served, "alice")
        await scenario(served)

    in_served(alices, Settings(token_file=file))


def withdraw(served: Served, file: Path) -> None:
    """Alice's token leaves the file."""
    write(file, "bob")
    served.verifier.authenticator.reload()


async def ended(served: Served, end: ClientEnd) -> list[wire.ServerMessage]:
    """All that comes before the fault that says why the connection ends; it is the last message."""
    messages = [wire.ServerMessage.FromString(frame) async for frame in end]
    last = messages.pop().fault
    assert (last.code, last.text, last.epoch) == (wire.FAULT_CODE_PROTOCOL, WITHDRAWN, 0)
    assert served.link.close_codes == [1008]
    return messages


async def nothing_is_left(served: Served) -> None:
    """No step begins any more, and nothing is held."""
    steps = len(served.engine.steps)
    await asyncio.sleep(60)
    assert len(served.engine.steps) <= steps
    assert (
        not len(served.verifier.worker)
        and not len(served.verifier.background_answers)
        and not len(served.verifier.store)
    )
    assert not served.engine.sequences_open and not served.verifier.plain.running


def at_once(began: float) -> bool:
    """Whether no more time has passed than a step takes."""
    return asyncio.get_running_loop().time() - began < 0.1


def asked(most: int, *, while_away: bool = False) -> wire.ClientMessage:
    message = prompt(1, 0, PROMPT, most=most)
    message.prompt.while_away = while_away
    return message


# -- sessions ----------------------------------------------------------------------------------------


def test_a_stream_on_credit_ends(file: Path) -> None:
    async def scenario(served: Served) -> None:
        end, _ = await served.session()
        await send(end, asked(900), wire.ClientMessage(credit=wire.Credit(epoch=1, position=900, serial=1)))
        for _ in range(5):
            await verdict_of(end)
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        late = await ended(served, end)
        assert at_once(began) and len(late) <= 2  # what was under way to the client
        await nothing_is_left(served)

    run(scenario, file)


def test_the_answer_of_who_has_left_ends(file: Path) -> None:
    async def scenario(served: Served) -> None:
        end, _ = await served.session()
        await send(end, asked(900, while_away=True))
        await verdict_of(end)
        served.link.cut()
        await served.link.closed()
        await served.steps(5)
        assert len(served.verifier.background_answers) == 1
        withdraw(served, file)
        await nothing_is_left(served)

    run(scenario, file)


def test_the_answer_of_who_says_nothing_ends(file: Path) -> None:
    async def scenario(served: Served) -> None:
        end, _ = await served.session()
        await send(end, asked(900, while_away=True))
        await verdict_of(end)
        while not len(served.verifier.background_answers):
            await asyncio.sleep(0.1)
        withdraw(served, file)
        await ended(served, end)
        await nothing_is_left(served)

    run(scenario, file)


def test_a_connection_that_ends_with_its_token_leaves_no_answer_behind(file: Path) -> None:
    async def scenario(served: Served) -> None:
        end, _ = await served.session()
        await send(end, asked(900, while_away=True))
        await verdict_of(end)
        withdraw(served, file)
        await ended(served, end)
        await nothing_is_left(served)

    run(scenario, file)


@pytest.mark.parametrize("greeted", [True, False])
def test_a_connection_that_says_nothing_ends(file: Path, greeted: bool) -> None:
    async def scenario(served: Served) -> None:
        end = (await served.session())[0] if greeted else await served.link.connect("")
        await asyncio.sleep(1)
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        assert not await ended(served, end) and at_once(began)
        await nothing_is_left(served)

    run(scenario, file)


def test_a_connection_that_is_made_meanwhile_ends(file: Path) -> None:
    """The upgrade was allowed, and the token withdrawn before the session began."""

    async def scenario(served: Served) -> None:
        withdraw(served, file)
        end = await served.link.connect("")
        await send(end, CLIENT.hello())
        assert not await ended(served, end)
        await nothing_is_left(served)

    run(scenario, file)


def test_a_prompt_that_is_being_read_is_dropped(file: Path) -> None:
    async def scenario(served: Served) -> None:
        served.engine.slow_s = 50.0
        end, _ = await served.session()
        await send(end, prompt(1, 0, [7] * 900))
        await served.steps(1)
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        assert not await ended(served, end) and at_once(began)
        assert not len(served.verifier.worker)
        served.engine.slow_s = 0.0
        await nothing_is_left(served)

    run(scenario, file)


@pytest.mark.parametrize("budget", ["prefill_tokens_per_second", "frames_per_second"])
def test_a_frame_that_waits_for_its_budget_is_dropped(file: Path, budget: str) -> None:
    async def scenario(served: Served) -> None:
        end, _ = await served.session()
        for epoch in range(1, 8):
            await send(end, prompt(epoch, 0, [epoch] * 90))
        await asyncio.sleep(1)
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        await ended(served, end)
        assert at_once(began)
        await nothing_is_left(served)

    run(scenario, file, **{budget: 0.01})


def test_a_conversation_without_a_connection_is_forgotten_and_others_are_not(file: Path) -> None:
    async def scenario(served: Served) -> None:
        tokens = {}
        for name in ("alice", "bob"):
            be(served, name)
            end, tokens[name] = await served.session()
            await send(end, asked(4))
            await verdict_of(end)
            served.link.cut()
            await served.link.closed()
        withdraw(served, file)
        assert len(served.verifier.store) == 1 and served.engine.sequences_open == 1
        end = await served.link.connect("")
        await send(end, resumed(tokens["bob"], PROMPT))
        assert (await receive(end)).welcome.resume_token == tokens["bob"]

    run(scenario, file)


def test_the_work_of_others_goes_on(file: Path) -> None:
    async def scenario(served: Served) -> None:
        be(served, "bob")
        bobs, _ = await served.session()
        await send(bobs, asked(30), wire.ClientMessage(credit=wire.Credit(epoch=1, position=900, serial=1)))
        stream = served.stream([5], 30)
        be(served, "alice")
        end, _ = await served.session()
        withdraw(served, file)
        await ended(served, end)
        await stream.answering
        assert stream.tokens == plain(ToyEngine(), [5], 30) and not stream.error
        tokens: list[int] = []
        while not (verdict := await verdict_of(bobs)).finish:
            tokens += verdict.tokens
        assert [*tokens, *verdict.tokens] == plain(ToyEngine(), PROMPT, 30)

    run(scenario, file)


def test_a_name_with_a_new_token_begins_anew(file: Path) -> None:
    async def scenario(served: Served) -> None:
        end, token = await served.session()
        await send(end, asked(4))
        await verdict_of(end)
        served.link.cut()
        await served.link.closed()
        file.write_text(file.read_text().replace(digest("alice-token"), digest("new-token")))
        served.verifier.authenticator.reload()
        await nothing_is_left(served)
        be(served, "new")
        assert served.bearer.name == "alice"
        end = await served.link.connect("")
        await send(end, resumed(token, PROMPT))
        assert (await receive(end)).welcome.resume_token != token

    run(scenario, file)


# -- plain decoding ----------------------------------------------------------------------------------


def test_a_stream_of_plain_decoding_ends(file: Path) -> None:
    async def scenario(served: Served) -> None:
        stream = served.stream([7], 900)
        await served.steps(5)
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        await stream.answering
        assert at_once(began) and stream.error == WITHDRAWN and len(stream.tokens) <= 5
        await nothing_is_left(served)

    run(scenario, file)


@pytest.mark.parametrize("budget", ["prefill_tokens_per_second", "frames_per_second"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_that_waits_for_its_budget_ends(file: Path, budget: str, streamed: bool) -> None:
    async def scenario(served: Served) -> None:
        first = served.stream([7] * 90, 1)
        await first.answering
        waiting = Stream(served, {"tokens": [7], "max_new_tokens": 5, "stream": streamed})
        await asyncio.sleep(1)
        assert not waiting.answering.done()
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        await waiting.answering
        assert at_once(began) and waiting.error == WITHDRAWN and not waiting.tokens
        await nothing_is_left(served)

    run(scenario, file, **{budget: 0.01})


def test_a_request_in_a_slow_step_ends(file: Path) -> None:
    async def scenario(served: Served) -> None:
        served.engine.slow_s = 50.0
        stream = Stream(served, {"tokens": [7], "max_new_tokens": 5})
        await served.steps(1)
        withdraw(served, file)
        began = asyncio.get_running_loop().time()
        await stream.answering
        assert at_once(began) and (stream.status, stream.error) == (401, WITHDRAWN)
        await nothing_is_left(served)

    run(scenario, file)


def test_a_request_whose_body_is_still_coming_ends(file: Path) -> None:
    async def scenario(served: Served) -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b'{"tokens": [', "more_body": True})
        request = Request({"type": "http", "method": "POST", "headers": []}, messages.get)
        answering = asyncio.create_task(served.verifier.plain.answer(request, served.bearer))
        await asyncio.sleep(1)
        withdraw(served, file)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(answering), 0.1)
        assert answering.done() and answering.result().status_code == 401

    run(scenario, file)
