"""``moa-chat --once``: one prompt, one answer."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, TextIO

from moa_chat import strings
from moa_chat.chat_config import ChatConfig
from moa_chat.terminal.answer_state import ending
from moa_chat.terminal.renderer import PlainView
from moa_runtime.errors import printable
from moa_runtime.events import AnswerFinished, AnswerUpdate, LinkChanged, LinkStatus
from moa_runtime.reasoning import split_reasoning


def run_once(config: ChatConfig, prompt: str, *, as_json: bool, out: TextIO | None = None) -> int:
    """Connect, ask, and write the answer to ``out`` (default: stdout)."""
    out = out or sys.stdout
    finished, begun = asyncio.run(_ask(config, prompt, None if as_json else PlainView(out)))
    text = split_reasoning(finished.text, begun=begun).answer
    note = ending(finished.reason, text, as_json=config.schema is not None)
    if config.schema is not None and note:
        print(strings.ONCE_CUT.format(note), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps(as_object(finished, config, begun=begun)), file=out, flush=True)
    return 0


async def _ask(config: ChatConfig, prompt: str, view: PlainView | None) -> tuple[AnswerFinished, bool]:
    """Show committed text in ``view`` as it comes, and report on stderr that the verifier is away; return the answer,
    and whether it begins inside its reasoning."""
    away, chat = False, await config.connect()
    try:
        async for event in chat.send(prompt, max_new_tokens=config.max_new_tokens, sampling=config.sampling()):
            if isinstance(event, AnswerFinished):
                if view is not None:
                    view.finish(event.text)
                return event, chat.tokenizer.begins_reasoning(config.thinking)
            if isinstance(event, AnswerUpdate):
                if view is not None:
                    view.draw(event.committed)
            elif isinstance(event, LinkChanged) and event.status is (LinkStatus.ONLINE if away else LinkStatus.OFFLINE):
                away = not away
                said = strings.ONCE_OFFLINE.format(event.detail) if away else strings.ONCE_ONLINE
                print(printable(said), file=sys.stderr, flush=True)
    finally:
        await chat.close()
    raise AssertionError("a chat's last event is AnswerFinished")


def as_object(finished: AnswerFinished, config: ChatConfig, *, begun: bool = False) -> dict[str, Any]:
    """Return the object that ``--json`` prints. ``begun``: see :mod:`moa_runtime.reasoning`."""
    reasoning, text = split_reasoning(finished.text, begun=begun)
    return {
        "text": text,
        **({"reasoning": reasoning} if reasoning else {}),
        "finish": finished.reason.value,
        "statistics": finished.statistics.as_dict(),
        "tokens": [{"id": token.token, "origin": token.origin.value} for token in finished.tokens],
        "server": config.server,
        "target": config.target,
    }
