"""Selection of the drafting side: the server, which streams, or the device, for whose drafts the server then waits."""

from __future__ import annotations

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.drafting.unsolicited import Pace
from moa_runtime.options import Drafting

#: Decay of the moving averages per verdict. Tokens vary from draft to draft; seconds follow link and load.
_SLOW_DECAY, _FAST_DECAY = 0.96, 0.9
#: Switch only if the other side is this many times as fast, and by ``_DOUBT / rounds`` more after few rounds.
_BETTER, _DOUBT = 1.05, 0.7
#: Drafts that have to show the rounds that they would have made: one passage that is copied makes several long ones.
_LEAST_ROUNDS = 12
#: Stream again if the server's answer to a round takes this many times as long as expected: link or verifier became
#: slower, or the round waits for passes of other sessions. The expectation follows slow changes by ``_DRIFT`` a round.
_LONGER, _DRIFT = 1.25, 0.02
_UNUSED = 16  # drafts in vain, one after the other, after which the device pauses
#: Tokens until the other side, or unsolicited drafts, are considered again; doubled each time that it was in vain.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 2048


class DrafterSelection:
    """Compare the tokens a second of streaming and of rounds at the present round trip.

    Streaming brings ``tokens a verdict / seconds between verdicts``, with what the device's unsolicited drafts bring.
    Rounds, in which the server waits for the device, bring ``tokens a round / (draft + round trip + the server's
    part)``. While the server streams, both are measured: each draft of the device shows the round that it would have
    made (:class:`~moa_runtime.drafting.unsolicited.UnsolicitedDrafts`), with the time between verdicts without the
    server's own draft as the server's part. Among many sessions a round also waits for a pass of the
    others, which shows in the first rounds.

    Rounds end if plain streaming would be faster, or if the server's answers take longer than a streamed verdict makes
    expect. After a pause the server streams again until drafts show once more that rounds are faster.

    Drafts pause after many useless ones. Rounds are not tried if the server takes drafts but has used none of the last
    twelve. If it does not take drafts, all are useless, and rounds are tried.

    Args:
        drafting: ``auto``, or the side that always drafts.
        able: whether the device can draft.

    Attributes:
        takes_drafts: whether the server takes unsolicited drafts.
    """

    def __init__(self, drafting: Drafting, *, able: bool) -> None:
        self.takes_drafts = False
        self._drafting: Drafting = drafting if able or drafting == "device" else "server"
        self._server = self._drafting != "device"
        self._round_trip_s: float | None = None
        # A verdict of the server: its tokens, its seconds, and its seconds without drafts.
        self._pushed, self._pushed_s, self._own_s = _MovingMean(_SLOW_DECAY), _MovingMean(), _MovingMean()
        # A round of the device, real or hypothetical: its tokens, seconds of its draft at both ends, the server's part.
        self._taken, self._draft_s, self._part_s = _MovingMean(_SLOW_DECAY), _MovingMean(), _MovingMean()
        self._rounds = 0  # since the last switch, real or hypothetical
        self._expected_wait_s = 0.0  # of a round, without draft and drafted tokens
        self._vain = 0  # drafts since one was used
        self._rounds_pause, self._drafts_pause = _Pause(), _Pause()

    @property
    def at_server(self) -> bool:
        """Whether the server shall stream."""
        return self._server

    @property
    def wants_draft(self) -> bool:
        """Whether the device shall draft while the server streams."""
        served = self.takes_drafts or not self._rounds_pause.left
        return (
            self._server and self._drafting == "auto" and served and self._pushed.known and not self._drafts_pause.left
        )

    @property
    def pace(self) -> Pace:
        """The pace of streaming."""
        return Pace(self._pushed.value, self._pushed_s.value, self._round_trip_s or 0.0)

    @property
    def round_s(self) -> float:
        """Seconds that a round without a draft is expected to take while the server streams."""
        return (self._round_trip_s or 0.0) + self._own_s.value

    def note_round_trip(self, seconds: float) -> float:
        """Note a measured round trip, without the time that the server held the frame; return the present estimate."""
        latest, old = max(0.0, seconds), self._round_trip_s
        self._round_trip_s = latest if old is None else min(latest, old + 0.2 * (latest - old))
        return self._round_trip_s

    def pushed(self, tokens: int, seconds: float, spared_s: float, *, used: bool = False) -> None:
        """Note a pushed verdict.

        Args:
            tokens: its committed tokens.
            seconds: since the verdict before.
            spared_s: seconds of it that drafts took.
            used: whether tokens of an unsolicited draft were accepted.
        """
        self._pushed.add(tokens)
        self._pushed_s.add(seconds)
        self._own_s.add(max(0.0, seconds - spared_s))
        self._rounds_pause.pass_by(tokens)
        self._drafts_pause.pass_by(tokens)
        if used:
            self._vain, self._drafts_pause = 0, _Pause()

    def drafted(self, outcome: RoundEnded, spared_s: float) -> None:
        """Note the round that a draft would have made; ``spared_s`` as in :meth:`round_ended`."""
        self._vain += 1
        # A crowded server that leaves out unsolicited drafts would also leave out the tokens of rounds.
        left_out = self.takes_drafts and self._vain >= _LEAST_ROUNDS
        if self._vain % _UNUSED == 0:
            self._drafts_pause.begin()
        if self._round_trip_s is None or not self._server:
            return
        self._add_round(outcome, outcome.accepted + 1, spared_s, self._round_trip_s)
        if self._drafting != "auto" or self._rounds_pause.left or self._rounds < _LEAST_ROUNDS or left_out:
            return
        if self._round_rate > self._margin * self._streaming_rate:
            self._switch(server=False)
            self._rounds_pause.begin()

    def round_ended(self, outcome: RoundEnded, tokens: int, spared_s: float) -> None:
        """Note a round of the device that committed ``tokens``.

        Args:
            spared_s: seconds of it that the server would have spared without the draft.
        """
        if outcome.supplied or self._round_trip_s is None or self._server:
            return
        self._add_round(outcome, tokens, spared_s, self._round_trip_s)
        self._rounds_pause.pass_by(tokens)
        if self._drafting != "auto" or not self._pushed.known:
            return
        wait_s, margin = self._round_trip_s + self._part_s.value, self._margin
        longer = wait_s / max(1e-6, self._expected_wait_s)
        self._expected_wait_s += _DRIFT * (wait_s - self._expected_wait_s)
        # On its own the server commits at least one token in each such part.
        if 1.0 / max(1e-6, self._part_s.value) > margin * self._round_rate or longer > _LONGER * margin:
            self._switch(server=True)
            self._rounds_pause.begin()
        elif not self._rounds_pause.left:
            self._switch(server=True)
            self._pushed, self._pushed_s, self._own_s = _MovingMean(_SLOW_DECAY), _MovingMean(), _MovingMean()

    @property
    def _margin(self) -> float:
        """Lead that the other side needs."""
        return _BETTER + _DOUBT / self._rounds

    @property
    def _round_rate(self) -> float:
        """Tokens a second of rounds."""
        assert self._round_trip_s is not None
        return self._taken.value / max(1e-6, self._draft_s.value + self._round_trip_s + self._part_s.value)

    @property
    def _streaming_rate(self) -> float:
        """Tokens a second while the server streams."""
        return self._pushed.value / max(1e-6, self._pushed_s.value)

    def _add_round(self, outcome: RoundEnded, tokens: int, spared_s: float, round_trip_s: float) -> None:
        self._rounds += 1
        self._taken.add(tokens)
        self._draft_s.add(outcome.draft_s + spared_s)
        self._part_s.add(max(0.0, outcome.waited_s - round_trip_s - spared_s))

    def _switch(self, *, server: bool) -> None:
        self._server, self._rounds = server, 0
        self._expected_wait_s, self._part_s = self.round_s, _MovingMean()


class _Pause:
    """A pause that is counted in tokens, and becomes longer each time.

    Attributes:
        left: tokens until it ends.
    """

    def __init__(self) -> None:
        self.left, self._next = 0, _FIRST_PAUSE

    def begin(self) -> None:
        self.left, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE)

    def pass_by(self, tokens: int) -> None:
        """Note committed tokens."""
        self.left = max(0, self.left - tokens)


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
