"""What window and terminal say about origins and the link."""

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
    Origin.KEPT: "You keep it; the server will go on from here.",
}

#: What an answer without text says while the device cannot write on.
PAUSES = {
    PauseReason.END: "Written to its end; the verifier has to confirm it…",
    PauseReason.LENGTH: "Written to its greatest length; the verifier has to confirm it…",
    PauseReason.LIMIT: "So much may be written offline; waiting for the verifier…",
    PauseReason.OFF: "Waiting for the verifier…",
    PauseReason.UNSURE: "This device is not sure how it goes on; waiting for the verifier…",
    PauseReason.UNPREPARED: "Waiting for the verifier: it has to read a question before this device can write on…",
    PauseReason.LOW_POWER: "Saving power: this device writes nothing alone; waiting for the verifier…",
    PauseReason.BACKGROUND: "In the background; it goes on when you are back…",
}


def reading_words(tokens: int) -> str:
    """What one waits for before an answer's first words."""
    return f"The verifier reads your text ({tokens:,} tokens)…" if tokens else "The verifier reads your text…"


def origin_sentence(origin: Origin, committed: bool) -> str:
    return (_CONFIRMED if committed else _UNCONFIRMED)[origin]


def dropped_sentence(text: str) -> str:
    return f"This device wrote “{text}”, and the server wrote something else instead."


def corrected_sentence(words: int) -> str:
    which = "1 word that this device wrote was" if words == 1 else f"{words} words that this device wrote were"
    return f"{which} corrected."


def excerpt(text: str, most: int) -> str:
    """The beginning of a text in one line, as many whole words as ``most`` characters hold, and a dot for the rest.

    >>> excerpt("one two\\nthree", 10)
    'one two…'
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    whole = line[: most + 1].rpartition(" ")[0]
    return (whole or line[:most]) + "…"


def link_words(link: LinkChanged, retry_in_s: float | None, *, wanted_offline: bool, slow: bool = False) -> str:
    """The pill's text; ``retry_in_s`` is the time left until the next attempt."""
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
    """Whether the connection stands and a verdict is late; the device writes on meanwhile."""
    return link.status is LinkStatus.ONLINE and bool(link.detail)


def as_sentence(text: str) -> str:
    """A message of the runtime with a capital letter and a full stop."""
    text = text.strip()
    ending = "" if text.endswith((".", "!", "?", "…")) else "."
    return text[:1].upper() + text[1:] + ending
