"""What whole answers cost the client in processor time; runs in the probe's process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from moa_bench.device.engines import backend_of
from moa_bench.device.steps import Emit
from moa_bench.result import rounded
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.draft_length import DraftLength
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.controllers import controller_for
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, ChatEvent, LinkChanged, LinkStatus
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

# The device's drafting is what is measured; on a busy machine a late verdict must not make it write on alone, which
# would count as drafting too.
_PATIENT = LoopSettings(late_after_s=120.0, prefill_late_after_s=120.0, drafting="device")


def measure_answers(
    *,
    bundle: str,
    target: str,
    threads: int,
    url: str,
    token: str,
    questions: Sequence[str],
    draft_length: DraftLength,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    emit: Emit,
) -> None:
    """Ask each question in a conversation of its own and count the processor time of this process meanwhile.

    Args:
        bundle: its folder.
        sampling: fields of :class:`moa_runtime.session.events.Sampling`.
        emit: told ``{"answer": figures}`` after each answer; loading and connecting are not counted.

    Raises:
        MoaError: the target cannot run here, or the verifier refuses or goes away.
    """
    opened = Bundle.open(bundle)
    name, _ = backend_of(target)
    backend = load_backend(opened, name, threads=threads)

    async def ask(question: str) -> dict[str, Any]:
        chat = Chat(
            opened,
            Endpoint(url, token),
            drafter=drafter_for(opened.manifest, backend),
            controller=controller_for(draft_length),
            settings=_PATIENT,
        )
        async with chat:
            await chat.open()
            cpu, wall = time.process_time(), time.perf_counter()
            events = chat.send(question, max_new_tokens=max_new_tokens, sampling=Sampling(**sampling))
            statistics = (await finished(events)).statistics
            return {
                "committed": statistics.tokens,
                "drafted": statistics.drafted,
                "cpu_s": rounded(time.process_time() - cpu),
                "wall_s": rounded(time.perf_counter() - wall),
            }

    for question in questions:
        emit({"answer": asyncio.run(ask(question))})


async def finished(events: AsyncIterator[ChatEvent]) -> AnswerFinished:
    """Follow an answer to its end.

    Raises:
        MoaError: the connection was lost; the chat would write on and wait for it.
    """
    async for event in events:
        if isinstance(event, LinkChanged) and event.status is LinkStatus.OFFLINE:
            raise MoaError(f"the connection to the verifier was lost: {event.detail}")
        if isinstance(event, AnswerFinished):
            return event
    raise MoaError("the answer ended without its last event")
