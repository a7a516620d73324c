"""A user who changes his mind while connections open and close, and drafters that fail. On a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import Any
from unittest import mock

import pytest

from integration.system.test_outages_and_hints import answering
from moa_runtime.chat import Chat, ChatError
from moa_runtime.drafters.moa import GrowingRows
from moa_runtime.events import AnswerUpdate, LinkStatus, PauseReason
from moa_runtime.options import Conditions
from moa_runtime.session.events import RolledBack, Sampling
from moa_runtime.transport import ConnectError
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.memory_link import ClientEnd, ServerEnd
from support.refusals import refused
from support.system.asking import DEVICE_DRAFTS, UNOPENED, end_of
from support.system.fuzz_world import World
from support.toy_engine import plain


@pytest.fixture
def slow_close() -> Any:
    """Closing a connection takes a second, as where the other end is out of reach."""
    close = ClientEnd.__aexit__

    async def slow(self: ClientEnd, *error: object) -> None:
        await asyncio.sleep(1.0)
        await close(self, *error)

    with mock.patch.object(ClientEnd, "__aexit__", slow):
        yield


async def asked(chat: Chat, **options: Any) -> None:
    """An answer, to its end."""
    await end_of(chat.send("Why?", max_new_tokens=20, **options))


# -- opening ------------------------------------------------------------------------------------------


@UNOPENED
async def test_opening_in_the_background_waits_for_nothing_and_connects_after_it(world: World) -> None:
    world.chat.tell_conditions(Conditions(background=True))
    await world.chat.open()
    assert (world.chat.status, world.chat.link.retry_in_s) == (LinkStatus.OFFLINE, None)
    world.chat.tell_conditions(Conditions())
    await asked(world.chat)
    assert world.chat.status is LinkStatus.ONLINE


@UNOPENED
async def test_going_offline_ends_the_opening(world: World) -> None:
    world.link.delay_up = lambda: 2.0
    opening = asyncio.create_task(world.chat.open())
    await asyncio.sleep(1)
    await world.chat.work_offline(True)
    await opening
    assert (world.chat.status, world.chat.link.detail) == (LinkStatus.OFFLINE, "working offline")


@UNOPENED
async def test_working_offline_may_be_chosen_before_the_chat_is_opened(world: World) -> None:
    await world.chat.work_offline(True)
    await world.chat.open()
    await asyncio.sleep(5)
    assert (world.chat.status, world.chat.link.detail) == (LinkStatus.OFFLINE, "working offline")
    await world.chat.work_offline(False)
    await asked(world.chat)
    assert world.chat.status is LinkStatus.ONLINE


@DEVICE_DRAFTS
async def test_an_answer_that_waits_goes_on_when_writing_offline_is_switched_on(world: World) -> None:
    world.chat.offline = "off"
    async with answering(world) as seen:
        await world.chat.work_offline(True)
        await asyncio.sleep(5)
        assert seen.pauses == [PauseReason.OFF]
        before = len(seen.events)
        world.chat.offline = "drafter"
        await asyncio.sleep(1)
        assert any(isinstance(event, AnswerUpdate) for event in seen.events[before:])
        await world.chat.work_offline(False)


@pytest.mark.parametrize("background", [False, True])
@UNOPENED
async def test_closing_ends_the_opening(world: World, background: bool) -> None:
    world.link.delay_up = lambda: 2.0
    opening = asyncio.create_task(world.chat.open())
    await asyncio.sleep(1)
    assert not opening.done()
    world.chat.tell_conditions(Conditions(background=background))
    await world.chat.close()
    with refused("closed", ConnectError) as closed:
        await opening
    assert closed.value.final


async def test_halves_of_characters_are_refused(world: World) -> None:
    """Neither could they be stored."""
    with refused("not_unicode"):
        await world.chat.send("a\ud800b").__anext__()
    with refused("not_unicode"):
        world.chat.restore([{"role": "user", "content": "a\udfffb"}, {"role": "assistant", "content": "b"}])


@UNOPENED
async def test_a_verifier_that_never_welcomes_is_no_verifier(world: World) -> None:
    async def says_nothing(end: ServerEnd) -> None:
        while (await end.receive())["type"] != "websocket.disconnect":
            pass

    serve, world.link._serve = world.link._serve, says_nothing
    with refused("no_welcome", ConnectError) as caught:
        await world.chat.open()
    assert " 20 s" in str(caught.value)
    world.link._serve = serve
    await asyncio.sleep(1)
    assert world.chat.status is LinkStatus.ONLINE
    await asked(world.chat)


# -- opening and closing links ------------------------------------------------------------------------


async def test_offline_and_online_again_before_the_connection_has_closed(world: World, slow_close: None) -> None:
    async with answering(world):
        leaving = asyncio.create_task(world.chat.work_offline(True))
        await asyncio.sleep(0.1)
        await world.chat.work_offline(False)
        await leaving


async def test_a_closed_chat_makes_no_connection(world: World, slow_close: None) -> None:
    closing = asyncio.create_task(world.chat.close())
    await asyncio.sleep(0.1)
    await world.chat.work_offline(False)
    await closing
    await world.chat.work_offline(False)
    await asyncio.sleep(1)
    assert len(world.link.headers) == 1


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "another network"])
async def test_a_change_that_is_not_awaited_takes_place(world: World, slow_close: None, offline: bool) -> None:
    async with answering(world):
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(world.chat.work_offline(True) if offline else world.chat.network_changed(), 0.2)
        if offline:
            await asyncio.sleep(0.1)
            assert world.chat.status is LinkStatus.OFFLINE
            await world.chat.work_offline(False)


async def test_after_another_device_took_over_the_chat_is_offline_and_may_come_back(world: World) -> None:
    await asked(world.chat)
    text = "elsewhere"
    taken = wire.ServerMessage(fault=wire.Fault(code=wire.FAULT_CODE_REPLACED, text=text))
    world.link.current.down.put(taken.SerializeToString(), 0.0)  # type: ignore[union-attr]
    await asyncio.sleep(5)
    assert (world.chat.status, world.chat.link.detail) == (LinkStatus.OFFLINE, text)
    await world.chat.work_offline(False)
    await asyncio.sleep(5)
    assert world.chat.status is LinkStatus.ONLINE
    await asked(world.chat)


async def test_rows_of_another_shape_are_a_refusal_that_names_both_shapes(world: World, toys: Any) -> None:
    """The verdict that brings them stands: its token is the target's. Where that has changed, the chat goes on."""
    lying = GrowingRows((2, 4))  # what the drafter holds; the toy's rows are of one head of one number
    add_rows, truncate_rows = world.drafter.add_rows, world.drafter.truncate_rows
    world.drafter.add_rows, world.drafter.truncate_rows = lying.write, lying.truncate  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ChatError, match=r"\((\d+), 1, 1\) and \(\1, 1, 1\), .*\(\1, 2, 4\)") as caught:
            await asked(world.chat)
        assert caught.value.__cause__ is None and world.chat.status is LinkStatus.OFFLINE
        assert (world.chat.link.detail, world.chat.link.retry_in_s) == (str(caught.value), None)
    confirmed = world.chat.tokens
    await asyncio.sleep(100)
    assert world.chat.status is LinkStatus.OFFLINE
    # Rows come behind the text, of which a server that goes on by itself has written more by then.
    written = len(confirmed) - world.chat.prompt_tokens
    assert written >= 1 if toys.drafting == "auto" else written == 1
    assert plain(world.engine, confirmed[:-written], written) == confirmed[-written:]
    world.drafter.add_rows, world.drafter.truncate_rows = add_rows, truncate_rows  # type: ignore[method-assign]
    await world.chat.network_changed()
    await asked(world.chat)
    assert plain(world.engine, world.chat.tokens[: world.chat.prompt_tokens], 20) == world.chat.tokens[-20:]


@DEVICE_DRAFTS
async def test_a_drafter_that_raises_ends_the_chat_with_its_error(world: World) -> None:
    def broken(prefix: object, budget: object, sampling: object) -> None:
        raise RuntimeError("the backend broke")

    world.drafter.propose = broken  # type: ignore[method-assign,assignment]
    for _ in range(2):
        with pytest.raises(ChatError, match="the backend broke") as failure:
            await asked(world.chat)
        assert isinstance(failure.value.__cause__, RuntimeError)


# -- defects ------------------------------------------------------------------------------------------


async def breaks(*_: object, **__: object) -> None:
    raise LookupError("a defect")


@pytest.mark.parametrize("wait", [True, False])
@UNOPENED
async def test_a_defect_while_connecting_reaches_whoever_waits(world: World, wait: bool) -> None:
    with mock.patch("moa_runtime.transport.connect", breaks):
        if wait:
            with refused("defect", ConnectError):
                await world.chat.open()
        else:
            await world.chat.open(wait=False)
        for _ in range(2):
            with refused("defect", ChatError) as failure:
                await asked(world.chat)
            assert isinstance(failure.value.__cause__, LookupError) and world.chat.gave_up
    assert (world.chat.status, world.chat.link.retry_in_s) == (LinkStatus.OFFLINE, None)
    await world.chat.work_offline(False)
    await asked(world.chat)
    assert not world.chat.gave_up


@pytest.mark.parametrize("part", ["reading", "writing", "its task"])
async def test_a_defect_of_the_link_in_an_answer_reaches_its_reader(world: World, part: str) -> None:
    end = world.link.current
    assert end is not None
    async with aclosing(world.chat.send("Why?", max_new_tokens=200)) as events:
        await anext(events)
        if part == "reading":
            end.down.put("no bytes \ud800", 0.0)  # cannot be encoded
        elif part == "writing":
            end.send = breaks  # type: ignore[method-assign]
            world.chat._driver._transport.send(b"")
        else:
            world.chat._driver._link_task.cancel()  # type: ignore[union-attr]
        with refused("defect", ChatError):
            async for _ in events:
                pass
    assert world.chat.gave_up
    world.chat._record.disputed = RolledBack(len(world.chat.tokens), (), ())
    kept = world.chat.keep_mine()
    assert kept is not None
    with refused("defect", ChatError):
        await anext(kept)
    await world.chat.work_offline(False)
    await asked(world.chat)


async def test_a_loop_that_is_cancelled_from_elsewhere_reaches_its_reader(world: World) -> None:
    async with aclosing(world.chat.send("Why?", max_new_tokens=200)) as events:
        await anext(events)
        world.chat._running.cancel()  # type: ignore[union-attr]
        with refused("defect", ChatError):
            async for _ in events:
                pass
    with refused("defect", ChatError):
        await asked(world.chat)


NAN = float("nan")
OUT_OF_RANGE = [(-0.5,), (NAN,), (1e39,), (0.8, NAN), (0.8, 1.5), (0.8, 0.9, -1), (0.8, 0.9, 1 << 64)]


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        *((Sampling(*values), "out_of_range") for values in OUT_OF_RANGE),
        (Sampling(0.8, min_p=1.5), "out_of_range"),
        (Sampling(0.8, repetition_penalty=0), "out_of_range"),
        (Sampling(0.8, logit_bias=((-1, 1.0),)), "out_of_range"),
    ],
)
async def test_sampling_that_is_refused_harms_no_other_session(world: World, sampling: Sampling, code: str) -> None:
    with refused(code, ChatError):
        await asked(world.chat, sampling=sampling)
    await asked(world.chat)
