"""Who drafts: the device, or the server, which then goes on by itself and streams."""

from __future__ import annotations

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.options import Drafting

#: A verdict counts so many times the one after it: tokens vary from draft to draft, seconds change with link and load.
_LONG, _SHORT = 0.96, 0.9
_BETTER = 1.05  # who drafts now is left where the other is so many times as fast
_WANTED = 1.2  # a token of the device counts so many times one of a server that is busy, and asks for it
_FAR = 1.6  # where the device is so many times as fast, the server need not show whether that is still so
_ENOUGH = 6  # verdicts that say how fast the one who drafts is
#: Drafts that say what the device could do: after fewer of them it must be so much better, or worse, as this by their
#: number; after so many it is left. The shape of its drafts is still being learnt by the first.
_FEW_TRIALS, _MOST_TRIALS, _DOUBT, _HOPE = 2, 24, 0.7, 3.0
#: Of a device that nobody has seen drafting.
_HOPED_TOKENS, _HOPED_DRAFT_S = 2.0, 0.01
_MOST_TOKENS = 6.0  # a round: no more is hoped for
#: Tokens until the other one is thought of again; twice as many after each time that it was not faster.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 2048
#: At once where round trip or verdicts take so many times what they took, or that part of it.
_CHANGED = 1.6


class Placement:
    """Compares tokens a second of both, at the present round trip.

    The server's are ``tokens a verdict / seconds between verdicts``, as measured while it went on by itself. The
    device's are ``tokens a round / (draft + trip + the server's part)``. While it drafts, all of these are measured.
    While the server does, the device makes a few drafts that are not sent (:class:`shadow_draft.Trial`): what they
    take, and what they would have brought; the server's part is then what a verdict of its own takes, with the device's
    draft in place of the server's. Even that is done only where the device could win, by the inequality of "Speculation
    at a Distance" (arXiv 2606.25091) with as many tokens a round as may be hoped for. A verifier that is busy lets more
    time pass between verdicts, by which drafting on the device gains, most where the round trip is short.

    A server that only decodes has one token a verdict: there the device begins, if two tokens a round would make it
    faster, and what its rounds bring tells the rest.

    While the device drafts, the server's rate is what it was, more or less by as much as its part of the rounds has
    changed; and at times it goes on by itself for a moment, to show what it is now, for its own drafts get better, too.

    Args:
        drafting: ``auto``, or whoever is to draft in any case.
        able: whether the device can draft at all.

    Attributes:
        drafts_wanted: the verifier is busy, and asks the device to draft.
        server_drafts: whether the server drafts while it goes on by itself, and may get better at it; one that does not
            takes what its part of the device's rounds says.
    """

    def __init__(self, drafting: Drafting, *, able: bool) -> None:
        self.drafts_wanted = self.server_drafts = False
        self._drafting: Drafting = drafting if able or drafting == "device" else "server"
        self._server = self._drafting != "device"
        self._trip_s: float | None = None
        # What a verdict of the server's brings and takes, and what it takes without the server's own draft ...
        self._pushed, self._pushed_s, self._own_s = _Mean(_LONG), _Mean(_SHORT), _Mean(_SHORT)
        # ... and what a round of the device's, or a trial, brings, its draft, and the server's part of it.
        self._taken, self._draft_s, self._part_s = _Mean(_LONG), _Mean(_SHORT), _Mean(_SHORT)
        self._trials = 0  # since the device was last thought of
        self._server_part_s: float | None = None  # of the device's first rounds since it took over
        self._since = 0  # verdicts since the last change
        self._pause, self._waits = _FIRST_PAUSE, 0
        self._look, self._stays = _FIRST_PAUSE, 0  # the same for the device, while it drafts
        self._left_rate: float | None = None  # the device's tokens a second, while the server shows its own
        self._judged: tuple[float, float] | None = None  # round trip, seconds between verdicts: at the last trials

    @property
    def at_server(self) -> bool:
        """Whether the server is to draft."""
        return self._server

    @property
    def wants_trial(self) -> bool:
        """Whether the device is to make a draft that is not sent."""
        known = self._since >= 2 and self._trip_s is not None
        if not self._server or self._drafting != "auto" or not known or self._left_rate is not None:
            return False
        if self._waits and not self._changed:
            return False
        hoped = _MOST_TOKENS / max(1e-6, self.round_s)
        return hoped > _BETTER * self._server_rate

    def trip(self, seconds: float) -> float:
        """What a frame and its answer took on the link, without what the server held it; says what that is by now."""
        least = max(0.0, seconds)
        self._trip_s = least if self._trip_s is None else min(least, self._trip_s + 0.2 * (least - self._trip_s))
        return self._trip_s

    @property
    def round_s(self) -> float:
        """What a round without a draft is expected to take while the server is the one who drafts."""
        return (self._trip_s or 0.0) + self._own_s.value

    def pushed(self, tokens: int, seconds: float, spared_s: float) -> None:
        """A verdict came unasked, with so many tokens, and so long after what came before; without a draft of the
        server's own it would have taken ``spared_s`` less."""
        self._pushed.add(tokens)
        self._pushed_s.add(seconds)
        self._own_s.add(max(0.0, seconds - spared_s))
        self._waits = max(0, self._waits - tokens)
        self._since += 1
        if self._promises:
            self._take_over()
        elif self._left_rate is not None and self._since >= _ENOUGH:
            left, self._left_rate = self._left_rate, None
            if left * _BETTER > self._server_rate:
                self._take_over()

    def tried(self, outcome: RoundEnded) -> None:
        """What a draft that was not sent would have brought, and took."""
        if self._trip_s is None:
            return
        self._trials += 1
        self._taken.add(outcome.accepted + 1)
        self._draft_s.add(outcome.draft_s)
        self._part_s.add(max(0.0, outcome.waited_s - self._trip_s))
        if self._trials < _FEW_TRIALS:
            return
        device = self._device_rate(self._trip_s + self._part_s.value)
        ratio, doubt = device / max(1e-6, self._server_rate), _DOUBT / self._trials
        if ratio > _BETTER + doubt:
            self._take_over()
        elif ratio < 1 - _HOPE * doubt or self._trials >= _MOST_TRIALS:
            self._wait()
        else:
            return
        self._judged = self._trip_s, self._pushed_s.value
        self._trials, self._part_s = 0, _Mean(_SHORT)

    def round_ended(self, outcome: RoundEnded, tokens: int) -> None:
        """A draft of the device got its verdict, of so many tokens."""
        if outcome.supplied or self._trip_s is None:
            return
        self._taken.add(tokens)
        self._draft_s.add(outcome.draft_s)
        self._part_s.add(max(0.0, outcome.waited_s - self._trip_s))
        self._since += 1
        self._stays = max(0, self._stays - tokens)
        if self._drafting != "auto" or self._server or self._since < _ENOUGH or not self._pushed.known:
            return
        part_s = max(1e-6, self._part_s.value)
        if self._server_part_s is None:
            self._server_part_s = part_s
        # By itself it has a token for each such part in any case.
        server = max(1.0, self._server_rate * self._server_part_s) / part_s
        device = self._device_rate(self._trip_s + part_s)
        if server > _BETTER * device:
            self._turn(server=True)
            self._wait()
        elif not self._stays and device < _FAR * server and self.server_drafts:
            self._turn(server=True)  # for a moment, to see how fast it is now
            self._pushed, self._left_rate = _Mean(_LONG), device

    @property
    def _promises(self) -> bool:
        """Whether a device that nobody has seen drafting is likely to be faster than a server that does not."""
        if not self.wants_trial or self.server_drafts or self._taken.known:
            return False
        return _HOPED_TOKENS / (_HOPED_DRAFT_S + self.round_s) > _BETTER * self._server_rate

    def _device_rate(self, round_s: float) -> float:
        """Tokens a second; worth more where the verifier asks for drafts.

        Args:
            round_s: what a round takes without its draft.
        """
        return (_WANTED if self.drafts_wanted else 1.0) * self._taken.value / max(1e-6, self._draft_s.value + round_s)

    @property
    def _server_rate(self) -> float:
        """Tokens a second, while it goes on by itself."""
        return self._pushed.value / max(1e-6, self._pushed_s.value)

    @property
    def _changed(self) -> bool:
        """Whether round trip or verdicts take something else than when the device was last thought of."""
        assert self._trip_s is not None
        now = self._trip_s, self._pushed_s.value
        return self._judged is not None and any(
            not 1 / _CHANGED < new / max(1e-6, old) < _CHANGED for new, old in zip(now, self._judged, strict=True)
        )

    def _turn(self, *, server: bool) -> None:
        self._server, self._since, self._server_part_s = server, 0, None
        self._part_s = _Mean(_SHORT)

    def _take_over(self) -> None:
        """The device drafts, and looks at what the server can do after a while."""
        self._turn(server=False)
        self._stays, self._look = self._look, min(2 * self._look, _LONGEST_PAUSE)

    def _wait(self) -> None:
        """The device is not thought of for a while."""
        self._waits, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)


class _Mean:
    """Of which older ones count less.

    Args:
        memory: how many times the one after it each counts.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._count = self._sum = 0.0

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def value(self) -> float:
        """0 of nothing."""
        return self._sum / self._count if self._count else 0.0

    def add(self, figure: float) -> None:
        self._count = self._memory * self._count + 1
        self._sum = self._memory * self._sum + figure
