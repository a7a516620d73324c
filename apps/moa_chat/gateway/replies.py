"""The bodies of replies: OpenAI's chat completions and completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moa_runtime.events import Statistics
from moa_runtime.reasoning import ReasoningSplitter, split_reasoning

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Ending:
    """How an answer ended; its tokens are counted up to the one that completes a stop text."""

    reason: str  # ``finish_reason``, "stop" or "length"
    statistics: Statistics
    prompt_tokens: int
    completion_tokens: int
    offline: bool  # whether the verifier was away at the end
    own_tokens: int  # how many of them the device wrote without the target


class Reply:
    """The objects of a chat completion with ``choices`` answers; all name the same id and time."""

    id_begins, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, choices: int, *, begun: bool = False) -> None:
        """``begun``: whether answers begin inside their reasoning, see :mod:`moa_runtime.reasoning`."""
        name = f"{self.id_begins}-{secrets.token_hex(12)}"
        self._about = {"id": name, "created": int(time.time()), "model": model}
        self.choices, self._begun = choices, begun
        self._splitters = [ReasoningSplitter(begun=begun) for _ in range(choices)]

    def whole(self, texts: Sequence[str], endings: Sequence[Ending]) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        choices = [
            _choice(index, ending.reason, **self.part(text))
            for index, (text, ending) in enumerate(zip(texts, endings, strict=True))
        ]
        return {**self._about, "object": self.whole_object, "choices": choices, "usage": usage_of(endings)}

    def first_chunks(self) -> str:
        """Return the chunks of a stream before any text."""
        delta = {"role": "assistant", "content": ""}
        return "".join(self._event([_choice(index, None, delta=delta)]) for index in range(self.choices))

    def chunk(self, index: int, text: str) -> str:
        """A piece of an answer in a stream, as a server-sent event; empty while it may become a mark of reasoning."""
        delta = self.delta(index, text)
        return self._event([_choice(index, None, **delta)]) if delta else ""

    def last_chunk(self, index: int, ending: Ending) -> str:
        """Return the chunk that says why an answer ended, and whether offline."""
        rest = self.delta(index, "", final=True)
        choice = _choice(index, ending.reason, **self.empty)
        held = self._event([_choice(index, None, **rest)]) if rest else ""
        return held + self._event([choice], moa={"offline": ending.offline})

    def end(self, endings: Sequence[Ending], *, include_usage: bool) -> str:
        """Return the end of a stream, with figures on request."""
        return (self._event([], usage=usage_of(endings)) if include_usage else "") + DONE

    @property
    def empty(self) -> dict[str, Any]:
        """The fields of a choice without text, in a stream."""
        return {"delta": {}}

    def part(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice that hold its whole text, its reasoning apart as vLLM has it."""
        reasoning, answer = split_reasoning(text, begun=self._begun)
        own = {"reasoning_content": reasoning} if reasoning else {}
        return {"message": {"role": "assistant", "content": answer, "refusal": None, **own}}

    def delta(self, index: int, text: str, *, final: bool = False) -> dict[str, Any]:
        """Return the fields of a choice that hold the text of a piece; none if nothing is certain yet."""
        reasoning, answer = self._splitters[index].feed(text, final=final)
        parts = {"reasoning_content": reasoning, "content": answer}
        delta = {name: part for name, part in parts.items() if part}
        return {"delta": delta} if delta else {}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._about, "object": self.chunk_object, "choices": choices, **more})


class TextReply(Reply):
    """The objects of a completion."""

    id_begins, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def first_chunks(self) -> str:
        return ""

    @property
    def empty(self) -> dict[str, Any]:
        return {"text": ""}

    def part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, index: int, text: str, *, final: bool = False) -> dict[str, Any]:
        return {"text": text} if text else {}


def event(data: dict[str, Any]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _choice(index: int, reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def usage_of(endings: Sequence[Ending]) -> dict[str, Any]:
    """Return OpenAI's figures, in which the prompt counts once, and the chat's own as the extension ``moa``."""
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
