"""A program that is closed or killed in the middle of an answer: the next one goes on from its file."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from moa_runtime.chat import Chat, ChatError
from moa_runtime.chat_store import ChatState, ChatStore, StoreError
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, LinkStatus, Origin, Paused, PauseReason
from moa_runtime.manifest import Fingerprints
from moa_runtime.session.events import FinishReason, Policy, Sampling
from moa_runtime.transport import SESSION_ID_HEADER, Endpoint, checked_session_id
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.memory_link import ClientEnd
from support.refusals import refused
from support.system.asking import DEVICE_DRAFTS, committed, end_of, ids, online
from support.system.fuzz_world import World
from support.toy_engine import plain

COUNT = 60
QUESTION = "Why?"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "chat.json"


@pytest.fixture
def world(world: AbstractAsyncContextManager[World]) -> AbstractAsyncContextManager[World]:
    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[World]:
        async with world as each:
            each.engine._delay_s = (0.3, 0.0)  # the file is written several times in an answer
            yield each

    return slow()


async def asked(world: World, tokens: int, text: str = QUESTION, **options: Any) -> AnswerUpdate | None:
    """Ask, kill the program when ``tokens`` are confirmed, and return the last update."""
    last = None
    async with aclosing(world.chat.send(text, max_new_tokens=COUNT, **options)) as events:
        async for event in events:
            last = event if isinstance(event, AnswerUpdate) else last
            if committed(event) >= tokens:
                await world.kill_program()
    return last


async def whole(chat: Chat, text: str = QUESTION) -> AnswerFinished:
    return await end_of(chat.send(text, max_new_tokens=COUNT))


async def reopened(world: World) -> Chat:
    world.start_program()
    await world.chat.open(wait=False)
    return world.chat


async def finished(world: World, seed: int = 0) -> tuple[list[ChatEvent], AnswerFinished]:
    """The rest of the answer that was under way, which must be the target's own."""
    chat = world.chat
    pending = chat.pending()
    assert pending is not None
    events = [event async for event in pending]
    end = events[-1]
    assert isinstance(end, AnswerFinished) and chat.pending() is None
    assert ids(end) == own(world, seed)
    assert end.statistics.tokens == COUNT
    assert chat.messages[-2:] == [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": end.text}]
    return events, end


def own(world: World, seed: int = 0) -> list[int]:
    """The answer as the target writes it."""
    chat = world.chat
    return plain(world.engine, chat.tokens[: chat.prompt_tokens], COUNT, seed)


def write_store(world: World, content: dict[str, Any]) -> None:
    """Write what the next program finds."""
    world.stored.write_text(json.dumps(content))  # type: ignore[union-attr]


def stored(world: World) -> dict[str, Any]:
    assert world.stored is not None
    content: dict[str, Any] = json.loads(world.stored.read_text())
    return content


# -- killed in the middle of an answer -------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 5])
async def test_an_answer_that_the_verifier_finished_meanwhile_is_fetched(world: World, seed: int) -> None:
    world.seed = seed
    shown = await asked(world, 20, sampling=Sampling(0.8, 0.95, seed) if seed else None)
    assert shown is not None
    await asyncio.sleep(30)
    forwards, world.engine.facts = world.engine.forwards, replace(world.engine.facts, dtype="int4")
    chat = await reopened(world)
    assert chat.question == QUESTION and chat.messages == [] and chat.store_problem == ""
    events, end = await finished(world, seed)
    first = events[0]
    assert isinstance(first, AnswerUpdate) and first.tokens[: committed(first)] == shown.tokens[: committed(first)]
    assert world.engine.forwards == forwards
    assert end.statistics.fetched > 30 and end.statistics.reconnects == 1
    assert end.statistics.dtype == "float32, int4"
    assert 0 < first.statistics.rounds <= end.statistics.rounds and first.statistics.bytes_up > 0


@pytest.mark.parametrize("fate", ["waits", "restarted"])
async def test_a_program_killed_before_the_first_token_finds_its_question(world: World, fate: str) -> None:
    world.engine._delay_s = (3.0, 0.0)
    asking = asyncio.create_task(anext(world.chat.send(QUESTION, max_new_tokens=COUNT)))
    await asyncio.sleep(0.5)
    assert stored(world)["answer"]["question"] == QUESTION
    await world.kill_program()
    with pytest.raises(StopAsyncIteration):
        await asking
    if fate == "restarted":
        await world.restart(1.0)
    chat = await reopened(world)
    assert chat.question == QUESTION and chat.tokens == []
    events, _ = await finished(world)
    assert isinstance(events[0], AnswerUpdate) and events[0].tokens == ()


async def test_text_written_offline_is_there_again_and_goes_on_where_the_link_does(world: World) -> None:
    written = 0
    async with aclosing(world.chat.send(QUESTION, max_new_tokens=COUNT)) as events:
        async for event in events:
            written = len(event.tokens) if isinstance(event, AnswerUpdate) else written
            if committed(event) >= 8 and world.link.open:
                world.link.open = False
                world.link.cut()
            if isinstance(event, Paused):
                await asyncio.sleep(4)  # until it is an outage, and stored
                await world.kill_program()
    chat = await reopened(world)
    pending = chat.pending()
    assert pending is not None
    first, second = await anext(pending), await anext(pending)
    while not isinstance(second, Paused):
        second = await anext(pending)
    assert isinstance(first, AnswerUpdate) and len(first.tokens) == written > committed(first) + 10
    assert Origin.OFFLINE in {token.origin for token in first.tokens if not token.committed}
    assert second.reason is PauseReason.UNPREPARED and chat.status is not LinkStatus.ONLINE
    world.link.open = True
    end = await end_of(pending)
    assert ids(end) == own(world) and end.statistics.offline >= 10


async def test_kept_text_is_kept_by_the_next_program(world: World) -> None:
    world.chat.policy = Policy.KEEP
    await asked(world, 20)
    content = stored(world)
    wrong = [1 + token % 40 for token in range(5)]
    content["session"] |= {"tentative": wrong, "origins": ["offline"] * 5}
    write_store(world, content)
    await asyncio.sleep(30)
    world.start_program()
    world.chat.policy = Policy.KEEP
    await world.chat.open(wait=False)
    end = await end_of(world.chat.pending())
    assert end.statistics.kept == 5
    assert [token.token for token in end.tokens if token.origin is Origin.KEPT] == wrong


# -- Hello and file --------------------------------------------------------------------------------------


async def test_the_file_has_the_count_of_a_hello_before_it_is_sent(world, monkeypatch):
    seen = []
    send = ClientEnd.send

    async def checked(end: ClientEnd, data: bytes) -> None:
        message = wire.ClientMessage.FromString(data)
        if message.HasField("hello"):
            seen.append(message.hello.resume.connection)
            assert stored(world)["session"]["connection"] == seen[-1]
        await send(end, data)

    monkeypatch.setattr(ClientEnd, "send", checked)
    for _ in range(3):
        world.link.cut()
        await asyncio.sleep(2)
    await world.kill_program()
    await reopened(world)
    await online(world.chat)
    assert seen == [2, 3, 4, 5]


@DEVICE_DRAFTS
async def test_a_hello_waits_for_its_file_and_drafting_does_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs keeps the connection, which is lost again meanwhile; and the device writes on."""
    keeper, hangs = world.chat._saver, asyncio.get_running_loop().create_future()
    save = keeper.save

    def hanging() -> asyncio.Future[None]:
        save()
        return hangs

    answering = asyncio.create_task(whole(world.chat))
    while not world.drafter.rows:  # without them it could write nothing alone
        await asyncio.sleep(0.01)
    monkeypatch.setattr(keeper, "save", hanging)
    world.link.cut()
    await asyncio.sleep(3)
    assert world.chat.status is LinkStatus.RECONNECTING
    assert len(world.chat._loop.unconfirmed) == 20
    world.link.cut()
    await asyncio.sleep(3)
    monkeypatch.undo()
    hangs.set_result(None)
    assert ids(await answering) == own(world)


async def test_nothing_of_an_answer_is_told_before_its_question_is_stored(world, monkeypatch):
    hangs, save = asyncio.get_running_loop().create_future(), world.chat._saver.save
    monkeypatch.setattr(world.chat._saver, "save", lambda: hangs)
    first = asyncio.create_task(anext(answering := world.chat.send(QUESTION, max_new_tokens=COUNT)))
    await asyncio.sleep(2)
    assert world.chat._loop.committed and not first.done()
    monkeypatch.setattr(world.chat._saver, "save", save)
    hangs.set_result(None)
    assert committed(await first) > 0
    await answering.aclose()


async def test_a_connection_and_an_end_are_stored_at_once(world: World) -> None:
    world.link.cut()
    await asyncio.sleep(0.1)
    world.stored.unlink()  # type: ignore[union-attr]
    await online(world.chat)
    await asyncio.sleep(0.01)
    assert stored(world)["session"]["resume_token"]
    answering = world.chat.send(QUESTION, max_new_tokens=COUNT)
    await anext(answering)
    while world.chat._loop.answering:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    assert stored(world)["answer"]["ended"] == "length"
    await end_of(answering)
    await asyncio.sleep(0.01)
    assert stored(world)["answer"] is None and len(stored(world)["messages"]) == 2


@pytest.mark.parametrize("sent", [False, True])
async def test_a_program_killed_around_its_hello_is_no_older_connection(world: World, sent: bool) -> None:
    """The server notices the end of the connection before long after the next program has come."""
    await asked(world, 20)
    chat = await reopened(world)
    while stored(world)["session"]["connection"] < 2 or (sent and world.link.current.up.last_frame is None):  # type: ignore[union-attr]
        await asyncio.sleep(0.001)
    assert chat.status is not LinkStatus.ONLINE
    end, current = ClientEnd.__aexit__, world.link.current

    async def unnoticed(self: ClientEnd, *error: object) -> None:
        if self is not current:
            await end(self, *error)

    with mock.patch.object(ClientEnd, "__aexit__", unnoticed), mock.patch.object(world.link, "cut"):
        await world.kill_program()
    await reopened(world)
    await finished(world)
    assert stored(world)["session"]["connection"] == 3
    world.link.cut()


# -- closed in order, stopped, heard ---------------------------------------------------------------------


async def test_closing_is_a_cut_and_ends_the_events(world: World) -> None:
    last = None
    async with aclosing(world.chat.send(QUESTION, max_new_tokens=COUNT)) as events:
        async for event in events:
            last = event
            if committed(event) == 8 or (committed(event) > 8 and not world.chat._closed):
                await world.chat.close()
    assert isinstance(last, AnswerUpdate)
    await asyncio.sleep(10)
    chat = await reopened(world)
    events_, end = await finished(world)
    assert isinstance(events_[0], AnswerUpdate) and committed(events_[0]) >= committed(last)
    assert end.statistics.fetched > 0 and len(chat.messages) == 2


async def test_an_answer_that_was_stopped_stays_stopped(world: World) -> None:
    async with aclosing(world.chat.send(QUESTION, max_new_tokens=COUNT)) as events:
        async for event in events:
            if committed(event) >= 8:
                break
    messages, tokens = world.chat.messages, world.chat.tokens
    assert len(messages) == 2
    await asyncio.sleep(1)
    await world.kill_program()
    chat = await reopened(world)
    assert chat.pending() is None and chat.messages == messages and chat.tokens == tokens


@pytest.mark.parametrize("answered", [False, True])
async def test_killed_between_stopping_and_its_end(world: World, answered: bool) -> None:
    """The file has the answer open, and the session has ended it."""
    await asked(world, 20 if answered else 0)
    content = stored(world)
    session = content["session"]
    session |= {"answering": False, "tentative": [], "origins": [], "supplied": []}
    if not answered:
        session |= {"committed": []}
        content["answer"] |= {"origins": []}
    write_store(world, content)
    chat = await reopened(world)
    assert chat.pending() is None and chat.store_problem == ""
    assert [turn["role"] for turn in chat.messages] == (["user", "assistant"] if answered else [])
    assert len((await whole(chat)).tokens) == COUNT


async def test_an_answer_whose_end_was_not_received_is_told_again(world: World) -> None:
    answering = world.chat.send(QUESTION, max_new_tokens=COUNT)
    await anext(answering)
    await asyncio.sleep(30)  # it ends, and the application is busy
    await world.kill_program()
    world.link.open = False
    chat = await reopened(world)
    assert chat.messages == [] and chat.question == QUESTION
    events, end = await finished(world)
    assert [type(event) for event in events] == [AnswerUpdate, AnswerFinished]
    assert end.reason is FinishReason.LENGTH and end.statistics.reconnects == 0
    world.link.open = True
    await online(world.chat)
    await answering.aclose()


# -- between two answers ---------------------------------------------------------------------------------


async def test_the_next_question_sends_only_what_is_new(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, send = [], ClientEnd.send

    async def noted(end: ClientEnd, data: bytes) -> None:
        message = wire.ClientMessage.FromString(data)
        prompts.extend([message.prompt] if message.HasField("prompt") else [])
        await send(end, data)

    monkeypatch.setattr(ClientEnd, "send", noted)
    await whole(world.chat)
    messages, tokens, start = world.chat.messages, world.chat.tokens, world.chat.prompt_tokens
    await asyncio.sleep(1)
    await world.kill_program()
    chat = await reopened(world)
    assert (chat.messages, chat.tokens, chat.prompt_tokens) == (messages, tokens, start)
    assert chat.pending() is None
    await online(world.chat)
    end = await whole(chat, "And then?")
    assert [prompt.base_len for prompt in prompts] == [0, len(tokens)]
    assert ids(end) == own(world)
    assert len(world.verifier.store) == 1 and len(chat.messages) == 4


async def test_another_question_before_the_pending_answer_is_heard(world: World) -> None:
    await asked(world, 20)
    chat = await reopened(world)
    with refused("pending", ChatError):
        await anext(chat.send("And then?"))
    chat.restore(chat.messages)
    assert chat.pending() is None
    end = await whole(chat, "And then?")
    assert ids(end) == own(world)
    assert [turn["content"] for turn in chat.messages] == ["And then?", end.text]


async def test_another_verifier_gets_neither_resume_token_nor_session_id(world: World, toys: Any) -> None:
    await asked(world, 20)
    assert (token := stored(world)["session"]["resume_token"])
    state = ChatState.from_json(stored(world))
    assert state.session_id_for(state.server) == state.session_id != state.session_id_for("ws://other")
    other = Chat(toys, Endpoint("ws://other"), drafter=None, store=world.stored)
    assert other._session.snapshot()["resume_token"] == ""
    other._saver._store.close()  # type: ignore[union-attr]
    await reopened(world)
    assert world.chat._session.snapshot()["resume_token"] == token
    await finished(world)


async def test_all_connections_and_programs_have_one_session_id(world: World) -> None:
    """The file of an older program has none: the next program makes it."""
    world.link.cut()
    await asked(world, 20)
    await reopened(world)
    await finished(world)
    told = {headers[SESSION_ID_HEADER] for headers in world.link.headers}
    content = stored(world)
    assert len(world.link.headers) >= 3 and told == {checked_session_id(content.pop("session_id"))}
    await world.kill_program()
    write_store(world, content)
    await online(await reopened(world))
    assert world.link.headers[-1][SESSION_ID_HEADER] == stored(world)["session_id"] not in told


# -- files that are of no use ----------------------------------------------------------------------------


def broken(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for name in path:
            content = content[name]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (broken("version", 9), "version 9"),
        (broken("session.version", 999), "version 999"),
        (broken("session.fingerprints", {"target": "other", "tokenizer": "t"}), "target 'other'"),
        (broken("messages", [{"role": "user"}]), "{'role': 'user'}"),
        (broken("messages", 3), "int"),
        (broken("ends", [[5, 5]]), "ends"),
        (broken("ends", [[0]]), "unpack"),
        (broken("answer", {}), "origins"),
        (broken("answer.question", None), "'content': None"),
        (broken("answer.origins", [["dreamt", 1]]), "dreamt"),
        (broken("answer.origins", []), "0 tokens"),
        (broken("answer.origins", [["drafted", -1]]), "-1"),
        (broken("answer.origins", [["drafted", 10**15]]), "16777216"),
        (broken("session.committed", [10**6]), "committed"),
        (broken("session.resume_token", "\ud800"), "resume_token"),
        (broken("answer.kept", 10**6), "tokens where"),
        (broken("answer.statistics.rounds", 1.5), "1.5"),
        (broken("answer.statistics.seconds", float("nan")), "nan"),
        (broken("answer.statistics.round_trips", ["x"]), "'x'"),
        (broken("session_id", "a\r\nb"), r"'a\r\nb'"),
        (broken("answer.ended", "rain"), "rain"),
    ],
)
async def test_a_file_of_no_use_is_set_aside_and_the_chat_begins_anew(world: World, change: Any, named: str) -> None:
    await asked(world, 20)
    content = stored(world)
    change(content)
    assert world.stored is not None
    write_store(world, content)
    text = world.stored.read_text()
    chat = await reopened(world)
    (aside,) = world.stored.parent.glob("chat-set-aside-*.json")
    assert aside.read_text() == text
    problem, file, _ = chat.store_problem.partition(str(aside))
    assert file and named in problem
    assert chat.messages == [] and chat.pending() is None
    assert len((await whole(chat)).tokens) == COUNT


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", "{}"])
async def test_what_is_no_chat_at_all_is_set_aside(toys: Any, store: Path, content: str) -> None:
    store.write_text(content)
    toys.manifest.max_context = 100
    async with Chat(toys, Endpoint("ws://verifier"), drafter=None, store=store) as chat:
        assert "broken" in chat.store_problem or content == "null"
    assert json.loads(store.read_text())["messages"] == []
    assert len([*store.parent.glob("chat-set-aside-*.json")]) == (content != "null")


async def test_a_second_program_is_refused_and_the_first_goes_on(world: World, toys: Any) -> None:
    async for event in world.chat.send(QUESTION, max_new_tokens=COUNT):
        if committed(event) == 8:
            with refused("in_use", StoreError):
                Chat(toys, Endpoint("ws://verifier"), drafter=None, store=world.stored)
    assert len(world.chat.messages) == 2
    await asyncio.sleep(1)
    await world.kill_program()
    assert (await reopened(world)).messages[0]["content"] == QUESTION


async def test_a_disk_that_is_full_is_told_and_the_chat_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StoreError("full", code="disk_full")

    monkeypatch.setattr(ChatStore, "write", fail)
    world.link.cut()
    assert len((await whole(world.chat)).tokens) == COUNT
    assert world.chat.store_problem == "full"
    monkeypatch.undo()
    await whole(world.chat)
    await asyncio.sleep(2)
    assert world.chat.store_problem == "" and len(stored(world)["messages"]) == 4


async def test_a_chat_may_be_stored_later(world: World, tmp_path: Path) -> None:
    await world.kill_program()
    path, world.stored = world.stored, None
    await reopened(world)
    await online(world.chat)
    await whole(world.chat)
    await world.chat.keep_in(tmp_path / "later.json")
    world.stored = tmp_path / "later.json"
    assert len(stored(world)["messages"]) == 2
    await asked(world, 20)
    chat = await reopened(world)
    assert len(chat.messages) == 2 and chat.pending() is not None
    with refused("already_stored", StoreError):
        await chat.keep_in(path)  # type: ignore[arg-type]
    await finished(world)


async def test_a_new_target_gets_no_old_tokens(world: World, toys: Any) -> None:
    await asked(world, 20)
    manifest = SimpleNamespace(**vars(toys.manifest) | {"fingerprints": Fingerprints("new", "tokenizer", "drafter")})
    other = SimpleNamespace(**vars(toys) | {"manifest": manifest})
    chat = Chat(other, Endpoint("ws://verifier"), drafter=None, store=world.stored, system="Be new.")
    assert "'new'" in chat.store_problem
    assert chat.messages == [{"role": "system", "content": "Be new."}] and chat.tokens == []
    await chat.close()
    world.start_program()
