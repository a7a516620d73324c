"""Messages as they are stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from moa_chat import strings
from moa_runtime.conversation import Unconfirmed, mark_from_json
from moa_runtime.errors import MoaError
from moa_runtime.events import Origin, TextSpan
from moa_runtime.session.events import Sampling
from moa_runtime.session.snapshot import sampling_from_json

_TITLE_LENGTH = 48


@dataclass(frozen=True)
class Dropped:
    """Text that was taken back while an answer was written; ``offset`` is where in the answer it stood."""

    offset: int
    text: str


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str  # Markdown
    spans: tuple[TextSpan, ...] = ()  # the content cut by origin; empty if no origins are known
    dropped: tuple[Dropped, ...] = ()  # what was taken back, by offset
    finished: bool = True  # False for an answer that is being written, or was when the program ended
    figures: str = ""  # one line about the answer, perhaps empty
    unconfirmed: Unconfirmed | None = None  # mark of an answer of the device alone, until it is checked
    cut_off: Sampling | None = None  # sampling of an answer that can be continued: it is too long, or was stopped
    target: str = ""  # fingerprint of the target that wrote an answer; empty if it is not known
    sampling: Sampling | None = None  # of an answer that the target has finished; None if it is not known

    @property
    def settled(self) -> Message:
        """The message as finished, for an answer that is no longer being written."""
        return self if self.finished else replace(self, finished=True, figures=strings.INTERRUPTED)

    @property
    def can_go_on(self) -> bool:
        """Whether it is an answer that was cut off, and that the target has seen."""
        return self.finished and self.cut_off is not None and self.unconfirmed is None

    @property
    def turn(self) -> dict[str, str]:
        """The message as the runtime takes it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class ChatSummary:
    """A row of the list of chats. ``updated`` is in seconds since 1970."""

    id: int
    title: str
    updated: float


def title_of(question: str) -> str:
    """A chat's title made from its first question: its first line, cut between words.

    >>> title_of("  What is\\nthe capital?")
    'What is'
    """
    line = next((line for line in question.splitlines() if line.strip()), "")
    words = " ".join(line.split())
    if len(words) <= _TITLE_LENGTH:
        return words or strings.NEW_CHAT
    return words[:_TITLE_LENGTH].rsplit(" ", 1)[0] + "…"


def origins_to_json(message: Message) -> str:
    """Return what is stored of a message beside its content, from which spans are cut by their lengths."""
    spans = [[len(span.text), span.origin.value, span.committed] for span in message.spans]
    stored: dict[str, Any] = {"spans": spans, "dropped": [[one.offset, one.text] for one in message.dropped]}
    if message.target:
        stored["target"] = message.target
    for name in ("unconfirmed", "cut_off", "sampling"):
        if (value := getattr(message, name)) is not None:
            stored[name] = asdict(value)
    return json.dumps(stored)


def origins_from_json(text: str, content: str) -> dict[str, Any]:
    """Read what :func:`origins_to_json` wrote, as arguments of :class:`Message`; none if it is damaged."""
    try:
        raw = json.loads(text)
        spans, offset = [], 0
        for length, origin, committed in raw["spans"]:
            spans.append(TextSpan(content[offset : offset + length], Origin(origin), bool(committed)))
            offset += length
        if spans and "".join(span.text for span in spans) != content:
            return {}
        return {
            "spans": tuple(spans),
            "dropped": tuple(Dropped(int(offset), str(dropped)) for offset, dropped in raw["dropped"]),
            "unconfirmed": mark_from_json(raw["unconfirmed"]) if "unconfirmed" in raw else None,
            "cut_off": sampling_from_json(raw["cut_off"]) if "cut_off" in raw else None,
            "target": str(raw.get("target", "")),
            "sampling": sampling_from_json(raw["sampling"]) if "sampling" in raw else None,
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, MoaError):
        return {}
