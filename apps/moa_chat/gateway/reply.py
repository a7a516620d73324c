"""The objects of OpenAI's chat completions."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from moa_chat.gateway.answer import Ending

DONE = "data: [DONE]\n\n"


class Reply:
    """The objects of one answer; all name the same id and time."""

    def __init__(self, model: str) -> None:
        self._about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": ending.reason}
        return {**self._about, "object": "chat.completion", "choices": [choice], "usage": ending.usage()}

    def chunk(self, text: str) -> str:
        """A piece of a stream, as a server-sent event."""
        return self._event([_choice({"content": text})])

    def first_chunk(self) -> str:
        return self._event([_choice({"role": "assistant", "content": ""})])

    def last_chunks(self, ending: Ending, *, include_usage: bool) -> str:
        """Why the answer ended, whether that was offline, and if asked for its figures."""
        chunks = self._event([_choice({}, ending.reason)], moa={"offline": ending.offline})
        if include_usage:
            chunks += self._event([], usage=ending.usage())
        return chunks + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._about, "object": "chat.completion.chunk", "choices": choices, **more})


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
