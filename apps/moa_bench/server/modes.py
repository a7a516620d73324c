"""The ways in which a client has its questions answered, one question after the other without end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from moa_bench.prompts import Prompt
from moa_bench.server.record import Recorder
from moa_bench.streaming import stream_decode
from moa_runtime.backends.base import Backend
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.draft_length import DraftLength
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.controllers import controller_for
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.events import AnswerFinished, AnswerUpdate
from moa_runtime.options import Drafting
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

# Longer than any queue before the verifier.
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Workload:
    """What a client asks, and with what settings.

    Attributes:
        draft_length: tokens of each draft, a chain, or as many as pay.
        max_new_tokens: tokens of an answer at most.
    """

    prompts: Sequence[Prompt]
    draft_length: DraftLength
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Asked:
    """The verifier that is asked.

    Attributes:
        http_url: see :attr:`moa_bench.verifier.Verifier.http_url`.
    """

    endpoint: Endpoint
    http_url: str


async def chat(
    bundle: Bundle, backend: Backend, asked: Asked, work: Workload, drafting: Drafting, recorder: Recorder
) -> None:
    """Ask with the runtime's chat, each question in a conversation and on a connection of its own.

    A client waits for its verdicts, however late. On its own device it would write on meanwhile; here that
    would only take processor time from the other clients.

    Raises:
        MoaError: the verifier refuses, or is not there.
    """
    for prompt in itertools.cycle(work.prompts):
        conversation = Chat(
            bundle,
            asked.endpoint,
            drafter=drafter_for(bundle.manifest, backend),
            controller=controller_for(work.draft_length),
            settings=LoopSettings(late_after_s=_PATIENCE_S, prefill_late_after_s=_PATIENCE_S, drafting=drafting),
        )
        try:
            await conversation.open()
            await _follow(conversation, prompt, work, recorder)
        finally:
            await conversation.close()


async def _follow(conversation: Chat, prompt: Prompt, work: Workload, recorder: Recorder) -> None:
    committed = 0
    recorder.asked()
    sending = conversation.send(prompt.text, max_new_tokens=work.max_new_tokens, sampling=work.sampling)
    async with aclosing(sending) as events:
        async for event in events:
            if not isinstance(event, AnswerUpdate | AnswerFinished):
                continue
            confirmed = sum(token.committed for token in event.tokens)
            if confirmed > committed:
                recorder.committed(confirmed - committed)
                committed = confirmed


async def stream(asked: Asked, work: Workload, recorder: Recorder) -> None:
    """Have the target alone answer, token by token, all over one kept-alive connection.

    Raises:
        MoaError: the verifier refuses, or is not there.
    """
    async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as client:
        for prompt in itertools.cycle(work.prompts):
            recorder.asked()
            decoding = stream_decode(
                client, asked.http_url, asked.endpoint.token, prompt.tokens, work.max_new_tokens, work.sampling
            )
            async with aclosing(decoding) as tokens:
                async for _ in tokens:
                    recorder.committed(1)
