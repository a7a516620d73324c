"""What the window has the runtime do, in the runtime's thread."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import ChatEvent
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

if TYPE_CHECKING:
    from moa_chat.desktop.profile import Settings
    from moa_runtime.chat import Chat


async def connect_chat(settings: Settings, endpoint: Endpoint, options: argparse.Namespace, store: Path | None) -> Chat:
    """See :func:`moa_chat.desktop.connection.connect`."""
    # Imported here, in the runtime's thread: the window is there first.
    from moa_chat.desktop.connection import connect

    return await connect(settings, endpoint, options, store)


async def replace_chat(before: Chat, chat: Chat, store: Path | None) -> None:
    """Close the chat before, and let the new one have its file."""
    await before.close()
    if store is not None:
        await chat.keep_in(store)


async def try_connection(settings: Settings, options: argparse.Namespace) -> str:
    """See :func:`moa_chat.desktop.connection.try_connection`."""
    from moa_chat.desktop import connection

    return await connection.try_connection(settings, options)


async def count_tokens(chat: Chat, turns: list[dict[str, str]]) -> int:
    """Of a conversation as it would be sent anew."""
    return len(await asyncio.to_thread(chat.tokenizer.encode_chat, turns, False)) if turns else 0


async def answer(
    chat: Chat, turns: list[dict[str, str]], question: str, max_new_tokens: int, sampling: Sampling
) -> AsyncGenerator[ChatEvent, None]:
    """Ask a question after these turns."""
    _have_turns(chat, turns)
    async with contextlib.aclosing(chat.send(question, max_new_tokens=max_new_tokens, sampling=sampling)) as events:
        async for event in events:
            yield event


async def continue_answer(
    chat: Chat, turns: list[dict[str, str]], max_new_tokens: int, sampling: Sampling | None
) -> AsyncGenerator[ChatEvent, None]:
    """Go on with the answer that the turns end with."""
    _have_turns(chat, turns)
    answer = chat.continue_answer(max_new_tokens=max_new_tokens, sampling=sampling)
    async with contextlib.aclosing(answer) as events:
        async for event in events:
            yield event


def _have_turns(chat: Chat, turns: list[dict[str, str]]) -> None:
    """What the chat knows of its turns beyond their text stays where they are the same."""
    if chat.messages != turns or chat.pending() is not None:
        chat.restore(turns)


async def check(chat: Chat, turns: list[dict[str, str]], mark: Unconfirmed) -> AsyncGenerator[ChatEvent, None]:
    """Have the marked answer among the turns checked."""
    chat.restore(turns, [mark])
    checks = chat.check()
    if checks is not None:
        async with contextlib.aclosing(checks) as events:
            async for event in events:
                yield event
