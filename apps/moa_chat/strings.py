"""Sentences of window and terminal about the origin of text and the link."""

from __future__ import annotations

from moa_runtime.events import LinkChanged, LinkStatus, Origin, PauseReason

#: Short names, for the legend.
ORIGINS = {
    Origin.DRAFTED: "drafted, accepted",
    Origin.CORRECTED: "by the server",
    Origin.OFFLINE: "offline",
    Origin.KEPT: "kept",
}
DROPPED = "taken back"
TENTATIVE = "not confirmed"

_CONFIRMED = {
    Origin.DRAFTED: "This device proposed it, and the server accepted it.",
    Origin.CORRECTED: "The server wrote this itself: a correction, or the word after an accepted draft.",
    Origin.OFFLINE: "This device wrote it without the server, which accepted it later.",
    Origin.KEPT: "This device wrote it without the server, and you kept it.",
}
_UNCONFIRMED = {
    Origin.DRAFTED: "This device proposes it; the server has not answered yet.",
    Origin.CORRECTED: "The server wrote this itself.",
    Origin.OFFLINE: "This device wrote it without the server, which may still change it.",
    Origin.KEPT: "You keep it; the server will continue from here.",
}

#: Shown in place of an answer without text while the device cannot continue it.
PAUSES = {
    PauseReason.END: "Complete; waiting for the verifier to confirm it…",
    PauseReason.LENGTH: "Length limit reached; waiting for the verifier to confirm it…",
    PauseReason.LIMIT: "Offline limit reached; waiting for the verifier…",
    PauseReason.OFF: "Waiting for the verifier…",
    PauseReason.UNSURE: "This device is not sure of the next words; waiting for the verifier…",
    PauseReason.UNPREPARED: "Waiting for the verifier: it has to read a question before this device can write on…",
    PauseReason.LOW_POWER: "Saving power: this device writes nothing on its own; waiting for the verifier…",
    PauseReason.BACKGROUND: "Paused in the background; it continues when you are back…",
}


def reading_words(tokens: int) -> str:
    """Return why an answer has no words yet: the target reads the prompt, with ``tokens`` new tokens (0: unknown)."""
    return f"The verifier reads your text ({tokens:,} tokens)…" if tokens else "The verifier reads your text…"


def origin_sentence(origin: Origin, committed: bool) -> str:
    return (_CONFIRMED if committed else _UNCONFIRMED)[origin]


def dropped_sentence(text: str) -> str:
    return f"This device wrote “{text}”, and the server wrote something else instead."


def corrected_sentence(words: int) -> str:
    which = "1 word that this device wrote was" if words == 1 else f"{words} words that this device wrote were"
    return f"{which} corrected."


def excerpt(text: str, most: int) -> str:
    """Shorten a text to one line of at most ``most`` characters and an ellipsis, cut between words.

    >>> excerpt("one two\\nthree", 10)
    'one two…'
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    whole = line[: most + 1].rpartition(" ")[0]
    return (whole or line[:most]) + "…"


def link_words(link: LinkChanged, retry_in_s: float | None, *, wanted_offline: bool, slow: bool = False) -> str:
    """Return the state of the link in words; ``retry_in_s`` is the time left until the next attempt."""
    if wanted_offline:
        return "working offline"
    if link.status is LinkStatus.ONLINE:
        return "slow" if slow or is_late(link) else "online"
    if link.status is LinkStatus.RECONNECTING:
        return "reconnecting"
    if retry_in_s:
        return f"offline, reconnecting in {max(1, round(retry_in_s))} s"
    return "offline"


def is_late(link: LinkChanged) -> bool:
    """Return whether the link is up and a verdict is late; the device continues in the meantime."""
    return link.status is LinkStatus.ONLINE and bool(link.detail)


def as_sentence(text: str) -> str:
    """Return a message of the runtime as a sentence, with a capital letter and a full stop."""
    text = text.strip()
    ending = "" if text.endswith((".", "!", "?", "…")) else "."
    return text[:1].upper() + text[1:] + ending
