"""The runtime's own chat, with one drafter or another, or none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from moa_bench.network.answer import Answer, Ask, Turn
from moa_bench.network.settings import NetworkSettings
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.controllers import controller_for
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.events import AnswerFinished, AnswerUpdate
from moa_runtime.options import Drafting
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.transport import Endpoint


@dataclass(frozen=True)
class ChatMode:
    """A new conversation for each answer.

    Args:
        new_drafter: what drafts the answer to a turn. With None the device proposes nothing and each round
            asks the target for one token.
        drafting: see :class:`moa_runtime.drafting.settings.LoopSettings`.
        timeline: see :meth:`moa_runtime.chat.Chat.connect`.
    """

    bundle: Bundle
    new_drafter: Callable[[Turn], Drafter | None]
    settings: NetworkSettings
    drafting: Drafting
    timeline: Timeline = NO_TIMELINE
    in_rounds: ClassVar[bool] = True

    @asynccontextmanager
    async def connect(self, endpoint: Endpoint, turn: Turn) -> AsyncIterator[Ask]:
        """See :meth:`moa_bench.network.answer.Mode.connect`."""
        settings = self.settings
        controller, drafter = controller_for(settings.draft_length), self.new_drafter(turn)
        loop = LoopSettings(drafting=self.drafting)
        chat = Chat(
            self.bundle, endpoint, drafter=drafter, controller=controller, settings=loop, timeline=self.timeline
        )
        async with chat:
            await chat.open()

            async def ask() -> Answer:
                answer = Answer(time.perf_counter())
                events = chat.send(turn.text, max_new_tokens=settings.max_new_tokens, sampling=settings.sampling)
                async for event in events:
                    if isinstance(event, AnswerUpdate):
                        committed = [token for token in event.tokens if token.committed]
                        if new := committed[len(answer.tokens) :]:
                            tokens, origins = [token.token for token in new], [token.origin for token in new]
                            answer.add(time.perf_counter(), tokens, origins)
                    elif isinstance(event, AnswerFinished):
                        statistics = event.statistics
                        answer.payload_up, answer.payload_down = statistics.bytes_up, statistics.bytes_down
                return answer

            yield ask
