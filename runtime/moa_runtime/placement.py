"""Who drafts: the device, or the server, which then goes on by itself and streams."""

from __future__ import annotations

from moa_runtime.drafting import Drafting
from moa_runtime.loop_events import RoundEnded

_MEMORY = 0.9  # a verdict counts so many times the one after it
_BETTER = 1.1  # who drafts now is left where the other is so many times as fast
_ENOUGH = 6  # verdicts that say how fast the one who drafts is
#: What a device that nobody has seen drafting may be hoped to do: tokens a round, and seconds that a draft takes.
_HOPED_TOKENS, _HOPED_DRAFT_S = 3.0, 0.02
#: Tokens after which the slower one is tried again; four times as many after each try that fails.
_FIRST_PAUSE = 256


class Placement:
    """Compares tokens a second of both, each as measured when it drafted last, at the present round trip.

    The server's are ``tokens a verdict / seconds between verdicts``. Of the device's rounds the draft and the server's
    part (queue and pass) are measured, and the round trip is added: ``tokens a round / (draft + trip + that part)``.
    Before the device has drafted, that part is what the server takes for a verdict of its own, and the draft is hoped
    to be good; so the device is tried only where it could win (the inequality of "Speculation at a Distance", arXiv
    2606.25091). A verifier that is busy lets more time pass between verdicts, by which drafting on the device gains.

    Args:
        drafting: ``auto``, or whoever is to draft in any case.
        able: whether the device can draft at all.
    """

    def __init__(self, drafting: Drafting, *, able: bool) -> None:
        self._drafting: Drafting = drafting if able or drafting == "device" else "server"
        self._server = self._drafting != "device"
        self._trip_s: float | None = None
        self._pushed, self._rounds = _Mean(), _Mean()
        self._draft_s = _Mean()
        self._since = 0  # verdicts since the last change
        self._pause, self._waits = _FIRST_PAUSE, 0  # tokens, until the device is tried again

    @property
    def at_server(self) -> bool:
        """Whether the server is to draft."""
        return self._server

    def trip(self, seconds: float) -> None:
        """What a frame and its answer took on the link, without what the server held it."""
        least = max(0.0, seconds)
        self._trip_s = least if self._trip_s is None else min(least, self._trip_s + 0.2 * (least - self._trip_s))

    def pushed(self, tokens: int, seconds: float) -> None:
        """A verdict came unasked, with so many tokens, and so long after what came before."""
        self._pushed.add(tokens, seconds)
        self._waits = max(0, self._waits - tokens)
        self._since += 1
        self._reconsider()

    def round_ended(self, outcome: RoundEnded, tokens: int) -> None:
        """A draft of the device got its verdict, of so many tokens."""
        if outcome.supplied or self._trip_s is None:
            return
        self._rounds.add(tokens, max(0.0, outcome.waited_s - self._trip_s))
        self._draft_s.add(1, outcome.draft_s)
        self._since += 1
        self._reconsider()

    def _reconsider(self) -> None:
        if self._drafting != "auto" or self._since < _ENOUGH or self._trip_s is None:
            return
        server, device = self._server_rate(), self._device_rate(self._trip_s)
        if server is None or device is None:
            return
        if self._server and device > _BETTER * server and not self._waits:
            self._server, self._since = False, 0
        elif not self._server and server > _BETTER * device:
            self._server, self._since = True, 0
            self._waits, self._pause = self._pause, 4 * self._pause

    def _server_rate(self) -> float | None:
        """Tokens a second; where the server has not streamed yet, those of one token a pass."""
        if self._pushed.count:
            return self._pushed.rate
        return None if not self._rounds.count else 1.0 / max(1e-6, self._rounds.seconds)

    def _device_rate(self, trip_s: float) -> float | None:
        if self._rounds.count:
            tokens, draft_s, server_s = self._rounds.tokens, self._draft_s.seconds, self._rounds.seconds
        elif self._pushed.count:
            tokens, draft_s, server_s = _HOPED_TOKENS, _HOPED_DRAFT_S, self._pushed.seconds
        else:
            return None
        return tokens / max(1e-6, draft_s + trip_s + server_s)


class _Mean:
    """Tokens and seconds a verdict, of which older ones count less."""

    def __init__(self) -> None:
        self.count = self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count = _MEMORY * self.count + 1
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds

    @property
    def tokens(self) -> float:
        return self._tokens / self.count

    @property
    def seconds(self) -> float:
        return self._seconds / self.count

    @property
    def rate(self) -> float:
        return self._tokens / max(1e-6, self._seconds)
