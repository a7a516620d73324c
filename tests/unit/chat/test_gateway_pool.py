"""Which chat a request gets."""

from __future__ import annotations

import asyncio
import itertools

import pytest

pytest.importorskip("starlette")


from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.schemas import ApiError
from moa_runtime.transport import ConnectError
from support.chat.pooled_chat import PooledChat


def conversation(*texts: str, system: str = "Be brief.") -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": "system", "content": system}] + [{"role": next(roles), "content": text} for text in texts]


class Pool:
    """A pool whose chats are numbered as they are opened; ``away`` is the verifier."""

    def __init__(self, size: int) -> None:
        self.opened: list[PooledChat] = []
        self.away = False
        self.pool = ChatPool(self.connect, size)

    async def connect(self, needs_verifier: bool = True) -> PooledChat:
        if self.away and needs_verifier:
            raise ConnectError("no verifier answers", final=False, code="unreachable")
        self.opened.append(PooledChat())
        return self.opened[-1]

    async def ask(self, *texts: str) -> int:
        """The number of the chat that gets this conversation, which it then holds with an answer."""
        history = conversation(*texts)
        async with self.pool.lend(history[:-1], texts[-1]) as [chat]:
            assert chat.messages == history[:-1]
            chat.messages = [*history, {"role": "assistant", "content": "yes"}]
            return self.opened.index(chat)


def test_a_chat_that_gave_up_is_closed_and_another_one_opened():
    async def run():
        pool = Pool(1)
        assert await pool.ask("a") == 0
        pool.opened[0].gave_up = True
        assert await pool.ask("a", "yes", "and?") == 0 and pool.opened[0].closed
        assert await pool.ask("a", "yes", "and?") == 1

    asyncio.run(run())


def test_a_request_gets_the_chat_that_knows_its_conversation():
    async def run():
        pool = Pool(3)
        assert [await pool.ask("a"), await pool.ask("b"), await pool.ask("c")] == [0, 1, 2]
        assert await pool.ask("b", "yes", "and?") == 1
        assert await pool.ask("a") == 0  # the same again
        # No room for another chat: the one that was not used for longest.
        assert await pool.ask("d") == 2
        await pool.pool.close()
        assert all(chat.closed for chat in pool.opened)

    asyncio.run(run())


def test_requests_at_once_get_chats_of_their_own_up_to_a_number():
    async def run():
        pool = Pool(2)
        history = conversation("a")
        async with pool.pool.lend(history, "x") as [one], pool.pool.lend(history, "x") as [other]:
            assert one is not other
            with pytest.raises(ApiError, match="at most 2 answers are written at once, 2 are") as caught:
                await pool.ask("b")
            assert caught.value.status == 429 and caught.value.headers["Retry-After"]
        assert await pool.ask("b") in (0, 1)

    asyncio.run(run())


def test_while_the_verifier_is_away_older_chats_serve_new_conversations():
    async def run():
        pool = Pool(3)
        pool.away = True
        with pytest.raises(ConnectError):
            await pool.ask("a")
        pool.away = False
        await pool.ask("a")
        pool.away = True
        assert await pool.ask("b") == 0
        pool.away = False
        assert await pool.ask("c") == 1

    asyncio.run(run())


def test_answers_of_one_request_get_chats_of_their_own():
    async def run():
        pool = Pool(4)
        history = conversation("a")
        assert await pool.ask("a") == 0
        async with pool.pool.lend(history[:-1], "a", count=3) as chats:
            assert len({id(chat) for chat in chats}) == 3 and chats[0] is pool.opened[0]
            with pytest.raises(ApiError, match="at most 4 answers are written at once, 3 are"):
                async with pool.pool.lend([], "b", count=2):
                    raise AssertionError
            assert await pool.ask("b") == 3
        assert len(pool.opened) == 4

    asyncio.run(run())


def test_where_not_all_can_be_had_none_is_lost():
    async def run():
        pool = Pool(3)
        connect = pool.connect

        async def two(needs_verifier: bool = True) -> PooledChat:
            pool.away = len(pool.opened) == 2
            return await connect(needs_verifier)

        pool.pool._connect = two
        with pytest.raises(ConnectError):
            async with pool.pool.lend([], "a", count=3):
                raise AssertionError
        pool.pool._connect = connect
        pool.away = False
        async with pool.pool.lend([], "a", count=3) as chats:
            assert len(chats) == 3 and len(pool.opened) == 3

    asyncio.run(run())


def test_a_text_that_is_typed_on_stays_with_its_chat():
    async def run():
        pool = Pool(3)
        typed = "x" * 120

        async def complete(text: str) -> int:
            async with pool.pool.lend([], text) as [chat]:
                chat.messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
                return pool.opened.index(chat)

        assert [await complete(text) for text in ("a", typed, typed + "y", "ab", typed + "yz")] == [0, 1, 1, 2, 1]

    asyncio.run(run())
