"""Selection of the drafting side: the device, or the server, which then streams without being asked."""

from __future__ import annotations

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.options import Drafting

#: Decay of the moving averages per verdict. Tokens vary from draft to draft; seconds follow link and load.
_SLOW_DECAY, _FAST_DECAY = 0.96, 0.9
_BETTER = 1.05  # switch only if the other side is this many times as fast
_WANTED = 1.2  # weight of the device's tokens while a busy server asks the device to draft
_FAR = 1.6  # a device this many times as fast need not check what the server can do now
_ENOUGH = 6  # verdicts after which a rate is known
#: Shadow drafts before the first judgement, and at most. A judgement needs a margin of `_DOUBT / number` to switch and
#: `_HOPE` times that to give up: the first drafts still have a shape that is being learned.
_FEW_SHADOWS, _MOST_SHADOWS, _DOUBT, _HOPE = 2, 24, 0.7, 3.0
#: Assumed of a device that has not drafted yet.
_HOPED_TOKENS, _HOPED_DRAFT_S = 2.0, 0.01
_MOST_TOKENS = 6.0  # a round, at the most that may be hoped for
#: Tokens until the other side is considered again; doubled each time that it was not faster.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 2048
#: Reconsider at once if round trip or verdicts take this many times as long as before, or that part of it.
_CHANGED = 1.6


class DrafterSelection:
    """Compare the tokens a second of device and server at the present round trip.

    The server's rate is ``tokens a verdict / seconds between verdicts``, measured while it streams. The device's rate
    is ``tokens a round / (draft + round trip + the server's part)``, measured while the device drafts.

    While the server streams, the device makes a few shadow drafts (:class:`in_flight.ShadowDraft`) that are never
    sent: they show what a draft takes and how much of it would be accepted; the server's part is then the time of one
    of its verdicts without its own draft. Shadow drafts are made only if the device could win, by the inequality of
    "Speculation at a Distance" (arXiv 2606.25091) with the most tokens a round that may be hoped for. A busy server
    takes longer between verdicts, so the device gains, most on a short round trip.

    A server that only decodes brings one token a verdict. There the device begins if two tokens a round would make it
    faster, and its rounds tell the rest.

    While the device drafts, the server's rate is scaled by the change of its part of the rounds. From time to time the
    server streams for a moment to show its present rate, because its own drafts may have become better.

    Args:
        drafting: ``auto``, or the side that always drafts.
        able: whether the device can draft.

    Attributes:
        drafts_wanted: whether the server is busy and asks the device to draft.
        server_drafts: whether the server drafts while it streams, so that its rate may become better.
    """

    def __init__(self, drafting: Drafting, *, able: bool) -> None:
        self.drafts_wanted = self.server_drafts = False
        self._drafting: Drafting = drafting if able or drafting == "device" else "server"
        self._server = self._drafting != "device"
        self._round_trip_s: float | None = None
        # A verdict of the server: its tokens, its seconds, and its seconds without the server's own draft.
        self._pushed, self._pushed_s, self._own_s = _MovingMean(_SLOW_DECAY), _MovingMean(), _MovingMean()
        # A round of the device, real or shadow: its tokens, the seconds of its draft, and the server's part.
        self._taken, self._draft_s, self._part_s = _MovingMean(_SLOW_DECAY), _MovingMean(), _MovingMean()
        self._shadows = 0  # since the device was last considered
        self._server_part_s: float | None = None  # of the device's first rounds since it began to draft
        self._since = 0  # verdicts since the last switch
        self._pause, self._waits = _FIRST_PAUSE, 0  # tokens until the device is considered again
        self._look, self._stays = _FIRST_PAUSE, 0  # tokens until the server is considered again
        self._left_rate: float | None = None  # the device's tokens a second, while the server shows its own
        self._judged: tuple[float, float] | None = None  # round trip, seconds between verdicts: at the last judgement

    @property
    def at_server(self) -> bool:
        """Whether the server shall draft."""
        return self._server

    @property
    def wants_shadow_draft(self) -> bool:
        """Whether the device shall make a draft that is not sent."""
        known = self._since >= 2 and self._round_trip_s is not None
        if not self._server or self._drafting != "auto" or not known or self._left_rate is not None:
            return False
        if self._waits and not self._changed:
            return False
        hoped = _MOST_TOKENS / max(1e-6, self.round_s)
        return hoped > _BETTER * self._server_rate

    @property
    def round_s(self) -> float:
        """Seconds that a round without a draft is expected to take while the server drafts."""
        return (self._round_trip_s or 0.0) + self._own_s.value

    def note_round_trip(self, seconds: float) -> float:
        """Note a measured round trip, without the time that the server held the frame; return the present estimate."""
        latest, old = max(0.0, seconds), self._round_trip_s
        self._round_trip_s = latest if old is None else min(latest, old + 0.2 * (latest - old))
        return self._round_trip_s

    def pushed(self, tokens: int, seconds: float, spared_s: float) -> None:
        """Note a pushed verdict.

        Args:
            tokens: its committed tokens.
            seconds: since the verdict before.
            spared_s: seconds of it that the server spent on its own draft.
        """
        self._pushed.add(tokens)
        self._pushed_s.add(seconds)
        self._own_s.add(max(0.0, seconds - spared_s))
        self._waits = max(0, self._waits - tokens)
        self._since += 1
        if self._promises:
            self._switch_to_device()
        elif self._left_rate is not None and self._since >= _ENOUGH:
            left, self._left_rate = self._left_rate, None
            if left * _BETTER > self._server_rate:
                self._switch_to_device()

    def shadow_ended(self, outcome: RoundEnded) -> None:
        """Note the hypothetical round of a shadow draft."""
        if self._round_trip_s is None:
            return
        self._shadows += 1
        self._add_round(outcome, outcome.accepted + 1, self._round_trip_s)
        if self._shadows < _FEW_SHADOWS:
            return
        device = self._device_rate(self._round_trip_s + self._part_s.value)
        ratio, doubt = device / max(1e-6, self._server_rate), _DOUBT / self._shadows
        if ratio > _BETTER + doubt:
            self._switch_to_device()
        elif ratio < 1 - _HOPE * doubt or self._shadows >= _MOST_SHADOWS:
            self._pause_device()
        else:
            return
        self._judged = self._round_trip_s, self._pushed_s.value
        self._shadows, self._part_s = 0, _MovingMean()

    def round_ended(self, outcome: RoundEnded, tokens: int) -> None:
        """Note a round of the device that committed ``tokens``."""
        if outcome.supplied or self._round_trip_s is None:
            return
        self._add_round(outcome, tokens, self._round_trip_s)
        self._since += 1
        self._stays = max(0, self._stays - tokens)
        if self._drafting != "auto" or self._server or self._since < _ENOUGH or not self._pushed.known:
            return
        part_s = max(1e-6, self._part_s.value)
        if self._server_part_s is None:
            self._server_part_s = part_s
        # On its own it commits at least one token in the time of each such part.
        server = max(1.0, self._server_rate * self._server_part_s) / part_s
        device = self._device_rate(self._round_trip_s + part_s)
        if server > _BETTER * device:
            self._switch(server=True)
            self._pause_device()
        elif not self._stays and device < _FAR * server and self.server_drafts:
            self._switch(server=True)  # for a moment, to measure its present rate
            self._pushed, self._left_rate = _MovingMean(_SLOW_DECAY), device

    @property
    def _promises(self) -> bool:
        """Whether a device that has not drafted yet is likely to be faster than a server that does not draft."""
        if not self.wants_shadow_draft or self.server_drafts or self._taken.known:
            return False
        return _HOPED_TOKENS / (_HOPED_DRAFT_S + self.round_s) > _BETTER * self._server_rate

    def _add_round(self, outcome: RoundEnded, tokens: int, round_trip_s: float) -> None:
        self._taken.add(tokens)
        self._draft_s.add(outcome.draft_s)
        self._part_s.add(max(0.0, outcome.waited_s - round_trip_s))

    def _device_rate(self, round_s: float) -> float:
        """Return the device's tokens a second, weighted if the server asks for drafts.

        Args:
            round_s: seconds of a round without its draft.
        """
        return (_WANTED if self.drafts_wanted else 1.0) * self._taken.value / max(1e-6, self._draft_s.value + round_s)

    @property
    def _server_rate(self) -> float:
        """Tokens a second while the server streams."""
        return self._pushed.value / max(1e-6, self._pushed_s.value)

    @property
    def _changed(self) -> bool:
        """Whether round trip or verdicts take much more or less than at the last judgement."""
        assert self._round_trip_s is not None
        now = self._round_trip_s, self._pushed_s.value
        return self._judged is not None and any(
            not 1 / _CHANGED < new / max(1e-6, old) < _CHANGED for new, old in zip(now, self._judged, strict=True)
        )

    def _switch(self, *, server: bool) -> None:
        self._server, self._since, self._server_part_s = server, 0, None
        self._part_s = _MovingMean()

    def _switch_to_device(self) -> None:
        """Let the device draft; the server is measured again after a while."""
        self._switch(server=False)
        self._stays, self._look = self._look, min(2 * self._look, _LONGEST_PAUSE)

    def _pause_device(self) -> None:
        """Do not consider the device for a while."""
        self._waits, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)


class _MovingMean:
    """An exponentially weighted mean.

    Args:
        decay: weight of a figure by that of the next one.
    """

    def __init__(self, decay: float = _FAST_DECAY) -> None:
        self._decay = decay
        self._count = self._sum = 0.0

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def value(self) -> float:
        """The mean; 0 if nothing was added."""
        return self._sum / self._count if self._count else 0.0

    def add(self, figure: float) -> None:
        self._count = self._decay * self._count + 1
        self._sum = self._decay * self._sum + figure
