"""The objects of OpenAI's chat completions and completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from moa_chat.gateway.answers import Ending

DONE = "data: [DONE]\n\n"


class Reply:
    """The objects of one request; all name the same id and time. These are a chat completion's.

    Attributes:
        choices: how many answers there are.
    """

    id_begins, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, choices: int) -> None:
        self._about = {
            "id": f"{self.id_begins}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self.choices = choices

    def whole(self, texts: Sequence[str], endings: Sequence[Ending]) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        choices = [
            _choice(index, ending.reason, **self.part(text, whole=True))
            for index, (text, ending) in enumerate(zip(texts, endings, strict=True))
        ]
        return {**self._about, "object": self.whole_object, "choices": choices, "usage": usage_of(endings)}

    def first_chunks(self) -> str:
        """What a stream begins with, before any text."""
        delta = {"role": "assistant", "content": ""}
        return "".join(self._event([_choice(index, None, delta=delta)]) for index in range(self.choices))

    def chunk(self, index: int, text: str) -> str:
        """A piece of an answer in a stream, as a server-sent event."""
        return self._event([_choice(index, None, **self.part(text, whole=False))])

    def last_chunk(self, index: int, ending: Ending) -> str:
        """Why an answer ended, and whether that was offline."""
        choice = _choice(index, ending.reason, **self.part("", whole=False))
        return self._event([choice], moa={"offline": ending.offline})

    def end(self, endings: Sequence[Ending], *, include_usage: bool) -> str:
        """The end of a stream, if asked for with figures."""
        return (self._event([], usage=usage_of(endings)) if include_usage else "") + DONE

    def part(self, text: str, *, whole: bool) -> dict[str, Any]:
        """How a choice holds its text."""
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._about, "object": self.chunk_object, "choices": choices, **more})


class TextReply(Reply):
    """The objects of a completion."""

    id_begins, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def first_chunks(self) -> str:
        return ""

    def part(self, text: str, *, whole: bool) -> dict[str, Any]:
        return {"text": text}


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _choice(index: int, reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def usage_of(endings: Sequence[Ending]) -> dict[str, Any]:
    """OpenAI's figures, in which the prompt counts once, and the chat's own as the extension ``moa``."""
    prompt, written = endings[0].prompt_tokens, sum(ending.completion_tokens for ending in endings)
    figures = [ending.statistics.as_dict() for ending in endings]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "moa": {
            **(figures[0] if len(figures) == 1 else {"choices": figures}),
            "offline": any(ending.offline for ending in endings),
            "offline_tokens": sum(ending.own_tokens for ending in endings),
        },
    }
