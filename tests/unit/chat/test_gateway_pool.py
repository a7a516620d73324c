"""The chat that a request gets."""

from __future__ import annotations

import asyncio
import itertools

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.pool import ChatPool
from moa_runtime.transport import ConnectError
from support.chat.pooled_chat import PooledChat
from support.refusals import refused


def conversation(*texts: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": "system", "content": "Be brief."}] + [{"role": next(roles), "content": text} for text in texts]


class Pool:
    """A pool whose chats are numbered as they are opened; the verifier is ``away`` from the chat of that number on."""

    def __init__(self, size: int) -> None:
        self.opened: list[PooledChat] = []
        self.away_from = size
        self.pool = ChatPool(self.connect, size)

    async def connect(self, needs_verifier: bool = True) -> PooledChat:
        if needs_verifier and len(self.opened) >= self.away_from:
            raise ConnectError("AWAY", final=False, code="unreachable")
        self.opened.append(PooledChat())
        return self.opened[-1]

    def ask(self, *texts: str, history: bool = True) -> int:
        """The number of the chat that gets this conversation, which it then holds with an answer."""

        async def lend() -> int:
            turns = conversation(*texts) if history else [{"role": "user", "content": texts[-1]}]
            async with self.pool.lend(turns[:-1], texts[-1]) as [chat]:
                assert chat.messages == turns[:-1]
                chat.messages = [*turns, {"role": "assistant", "content": "yes"}]
                return self.opened.index(chat)

        return asyncio.run(lend())


def test_a_request_gets_the_chat_that_knows_its_conversation():
    pool = Pool(3)
    assert [pool.ask("a"), pool.ask("b"), pool.ask("c")] == [0, 1, 2]
    assert pool.ask("b", "yes", "and?") == 1 and pool.ask("a") == 0
    assert pool.ask("d") == 2, "no room for another chat: the one that was not used for longest"
    asyncio.run(pool.pool.close())
    assert all(chat.closed for chat in pool.opened)


def test_a_text_that_is_typed_on_stays_with_its_chat():
    pool, typed = Pool(3), "x" * 120
    texts = ("a", typed, typed + "y", "ab", typed + "yz")
    assert [pool.ask(text, history=False) for text in texts] == [0, 1, 1, 2, 1]


def test_a_chat_that_gave_up_is_closed_and_another_one_opened():
    pool = Pool(1)
    pool.away_from = 9
    assert pool.ask("a") == 0
    pool.opened[0].gave_up = True
    assert pool.ask("a", "yes", "and?") == 0 and pool.opened[0].closed
    assert pool.ask("a", "yes", "and?") == 1


def test_older_chats_serve_new_conversations_while_the_verifier_is_away():
    pool = Pool(3)
    pool.away_from = 0
    with pytest.raises(ConnectError):
        pool.ask("a")
    pool.away_from = 1
    assert pool.ask("a") == 0 and pool.ask("b") == 0
    pool.away_from = 3
    assert pool.ask("c") == 1


def test_answers_at_once_get_chats_of_their_own_up_to_a_number():
    async def run():
        pool = Pool(4)
        history = conversation("a")
        async with pool.pool.lend(history, "x", count=3) as chats, pool.pool.lend(history, "x") as [other]:
            assert len({id(chat) for chat in (*chats, other)}) == 4
            with refused("rate_limit_exceeded", ApiError) as caught:
                async with pool.pool.lend(history, "x"):
                    raise AssertionError
            assert caught.value.status == 429 and caught.value.headers["Retry-After"]
        async with pool.pool.lend(history, "x", count=4) as chats:
            assert len(chats) == len(pool.opened) == 4

    asyncio.run(run())


def test_if_not_all_chats_can_be_opened_none_is_lost():
    async def run():
        pool = Pool(3)
        pool.away_from = 2
        with pytest.raises(ConnectError):
            async with pool.pool.lend([], "a", count=3):
                raise AssertionError
        pool.away_from = 3
        async with pool.pool.lend([], "a", count=3) as chats:
            assert len(chats) == len(pool.opened) == 3

    asyncio.run(run())
