"""The bodies of replies: OpenAI's chat completions and completions, with vLLM's figures of drafts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.tool_formats.tool_format import CallSplitter
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
    reasoning_tokens: int  # of them
    offline: bool  # whether the verifier was away at the end
    own_tokens: int  # how many of them the device wrote without the target


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer with its log probability."""

    written: bytes  # perhaps a part of a character
    start: int  # number of characters before it
    logprob: float | None  # None if the target did not compute it: the device wrote it, say
    top: Sequence[tuple[bytes, float]]  # the likeliest tokens in its place

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        top = [_scored(written, logprob) for written, logprob in self.top]
        return {**_scored(self.written, self.logprob), "top_logprobs": top}


def _scored(written: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _shown(written), "logprob": _finite(logprob), "bytes": list(written)}


def _shown(written: bytes) -> str:
    return written.decode(errors="replace")


def _named(written: bytes) -> str:
    """Return a token's text, or its bytes as OpenAI names them: parts of characters must differ."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _finite(logprob: float | None) -> float | None:
    """Return a number that JSON has: OpenAI's for no probability at all is -9999."""
    return None if logprob is None else max(logprob, -9999.0)


#: A part of an answer: some of its tokens, which the next choice shows, then text, and at last its end.
Part = str | list[ScoredToken] | Ending


class Reply:
    """The objects of a chat completion with ``choices`` answers; all name the same id and time."""

    id_begins, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, choices: int, *, begun: bool = False, calls: Callable[[], CallSplitter] | None = None
    ) -> None:
        """
        Args:
            begun: whether answers begin inside their reasoning, see :mod:`moa_runtime.reasoning`.
            calls: makes what reads an answer's calls of tools; None if it has none.
        """
        name = f"{self.id_begins}{secrets.token_hex(12)}"
        self._about = {"id": name, "created": int(time.time()), "model": model}
        self.choices, self._begun = choices, begun
        self._scores: list[list[ScoredToken]] = [[] for _ in range(choices)]  # of tokens that no choice has shown
        self._splitters = [ReasoningSplitter(begun=begun) for _ in range(choices)]
        self._calls = [calls() for _ in range(choices)] if calls else []

    def score(self, index: int, tokens: Sequence[ScoredToken]) -> None:
        """Have the next choice of an answer show these tokens, too."""
        self._scores[index] += tokens

    def whole(self, texts: Sequence[str], endings: Sequence[Ending]) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        choices = [
            self._whole_choice(index, text, ending)
            for index, (text, ending) in enumerate(zip(texts, endings, strict=True))
        ]
        about = {**self._about, "object": self.whole_object, "choices": choices}
        return about | {"usage": usage_of(endings), "metrics": metrics_of(endings)}

    def first_chunks(self) -> str:
        """Return the chunks of a stream before any text."""
        delta = {"role": "assistant", "content": ""}
        return "".join(self._event([self._choice(index, None, delta=delta)]) for index in range(self.choices))

    def chunk(self, index: int, text: str) -> str:
        """A piece of an answer in a stream, as a server-sent event; empty while it may become a mark of reasoning."""
        delta = self.delta(index, text)
        return self._event([self._choice(index, None, **delta)]) if delta else ""

    def last_chunk(self, index: int, ending: Ending) -> str:
        """Return the chunk that says why an answer ended, and whether offline."""
        rest = self.delta(index, "", final=True)
        held = self._event([self._choice(index, None, **rest)]) if rest else ""
        choice = self._choice(index, self._reason(index, ending), **self.empty)
        dropped = ending.statistics.dropped_turns
        moa = {"offline": ending.offline, **({"dropped_turns": dropped} if dropped else {})}
        return held + self._event([choice], moa=moa)

    def end(self, endings: Sequence[Ending], *, include_usage: bool) -> str:
        """Return the end of a stream, with figures on request."""
        figures = {"usage": usage_of(endings), "metrics": metrics_of(endings)}
        return (self._event([], **figures) if include_usage else "") + DONE

    def failure(self, error: ApiError) -> str:
        """Return the end of a stream that an error ends: its status is sent already."""
        return event(error.body)

    @property
    def empty(self) -> dict[str, Any]:
        """The fields of a choice without text, in a stream."""
        return {"delta": {}}

    def _whole_choice(self, index: int, text: str, ending: Ending) -> dict[str, Any]:
        part = self.part(index, text)
        return self._choice(index, self._reason(index, ending), **part)

    def _reason(self, index: int, ending: Ending) -> str:
        """Return why an answer ended, as OpenAI names it."""
        called = bool(self._calls) and self._calls[index].called
        return "tool_calls" if called and ending.reason == "stop" else ending.reason

    def part(self, index: int, text: str) -> dict[str, Any]:
        """Return the fields of a choice that hold its whole text, its reasoning apart as vLLM has it."""
        reasoning, answer = split_reasoning(text, begun=self._begun)
        own: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if self._calls:
            answer, calls = self._calls[index].whole(answer)
            own |= {"tool_calls": calls} if calls else {}
        content = None if "tool_calls" in own and not answer else answer
        return {"message": {"role": "assistant", "content": content, "refusal": None, **own}}

    def delta(self, index: int, text: str, *, final: bool = False) -> dict[str, Any]:
        """Return the fields of a choice that hold the text of a piece; none if nothing is certain yet."""
        reasoning, answer = self._splitters[index].feed(text, final=final)
        calls: list[dict[str, Any]] = []
        if self._calls:
            answer, calls = self._calls[index].feed(answer, final=final)
        parts = {"reasoning_content": reasoning, "content": answer, "tool_calls": calls}
        delta = {name: part for name, part in parts.items() if part}
        return {"delta": delta} if delta else {}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return the field of a choice that shows these tokens."""
        return {"content": [token.as_dict() for token in tokens], "refusal": None}

    def _choice(self, index: int, reason: str | None, **content: Any) -> dict[str, Any]:
        scores, self._scores[index] = self._scores[index], []
        logprobs = self.logprobs(scores) if scores else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._about, "object": self.chunk_object, "choices": choices, **more})


class TextReply(Reply):
    """The objects of a completion."""

    id_begins, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def first_chunks(self) -> str:
        return ""

    @property
    def empty(self) -> dict[str, Any]:
        return {"text": ""}

    def part(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, index: int, text: str, *, final: bool = False) -> dict[str, Any]:
        return {"text": text} if text else {}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        shown = [_named(token.written) for token in tokens]
        likeliest = []
        for name, token in zip(shown, tokens, strict=True):
            each = {_named(written): _finite(logprob) for written, logprob in token.top}
            likeliest.append(None if token.logprob is None else {name: _finite(token.logprob), **each})
        return {
            "tokens": shown,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": likeliest,
            "text_offset": [token.start for token in tokens],
        }


def event(data: dict[str, Any]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def usage_of(endings: Sequence[Ending]) -> dict[str, Any]:
    """Return OpenAI's figures, in which the prompt counts once, and the chat's own as the extension ``moa``."""
    prompt, written = endings[0].prompt_tokens, sum(ending.completion_tokens for ending in endings)
    figures = [ending.statistics.as_dict() for ending in endings]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "completion_tokens_details": {"reasoning_tokens": sum(ending.reasoning_tokens for ending in endings)},
        "moa": {
            **(figures[0] if len(figures) == 1 else {"choices": figures}),
            "offline": any(ending.offline for ending in endings),
            "offline_tokens": sum(ending.own_tokens for ending in endings),
        },
    }


def metrics_of(endings: Sequence[Ending]) -> dict[str, Any] | None:
    """Return vLLM's figures of the drafts of an answer, the device's and the server's; None for several answers."""
    if len(endings) != 1:
        return None
    verified = endings[0].statistics.verified
    drafted, accepted = (sum(draft[part] for draft in verified) for part in (0, 1))
    by_length = {length: [0] * (length + 1) for length in sorted({length for length, _ in verified})}
    for length, taken in verified:
        by_length[length][taken] += 1
    longest = max(by_length, default=0)
    histogram = [sum(row[count] for row in by_length.values() if count < len(row)) for count in range(longest + 1)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / max(1, len(verified)),
            "draft_acceptance_rate": accepted / max(1, drafted),
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(length): row for length, row in by_length.items()},
            "num_spec_steps": len(verified),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": longest,
        }
    }
