"""What a verifier knows of a conversation, and what it does unasked: tokens within the credit, memory rows."""

from __future__ import annotations

from moa_runtime.session.handshake import Limits
from moa_runtime.session.memory_rows import Float32
from moa_runtime.session.row_queue import RowsBehind
from moa_runtime.session.sampling import Sampling
from moa_runtime.session.server_table import State
from moa_runtime.session.work import RowsWork, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: While verdicts are pushed, rows are made for so many tokens at a time ...
_ROWS_TOGETHER = 16
#: ... of at most so many at once ...
_MOST_ROWS = 64
#: ... and so many follow a verdict, so that text need not wait for them.
_ROWS_BEHIND_PUSHED = 4
#: ... but of the prompt more: without them the client cannot know whether its drafts would be faster.
_PROMPT_ROWS_BEHIND_PUSHED = 16


class ServerState:
    """One conversation, without the frames: :class:`~moa_runtime.session.server.ServerSession` is the class to use.

    Attributes:
        committed: its tokens.
        connection: the count of the newest connection.
        round_trip_us: of its link, as the client says; 0 where it does not.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.committed: list[int] = []
        self.connection = 0
        self._epoch = self.round_trip_us = 0
        self._answer_start: int | None = None  # committed length right after the last Prompt
        self._finish: int | None = None  # of the answer that ended, if one did
        self._max_length = 0
        self._sampling = Sampling()
        self._while_away = False
        self._credit = 0  # up to here verdicts are pushed
        self._rows = RowsBehind()
        self._rows_turn = False  # rows may be made before the next verdict is pushed
        self._stands = False  # nothing is done unasked before the next frame
        self._told = 0  # the client has been sent, or sent, so much of what is committed
        self._asked = False  # an answer goes on, or began, on this connection

    @property
    def state(self) -> State:
        """Where the conversation is, which follows from what is held of it."""
        if self._answer_start is None:
            return State.IDLE
        if self._finish is not None:
            return State.ENDED
        return State.ANSWERING if len(self.committed) > self._answer_start else State.PROMPTED

    @property
    def runs(self) -> bool:
        """Whether an answer is being written."""
        return self.state in (State.PROMPTED, State.ANSWERING)

    @property
    def pushes(self) -> bool:
        """Whether verdicts are to be sent unasked."""
        return self.runs and len(self.committed) < self._credit

    @property
    def client_takes_rows(self) -> bool:
        """Whether the client could draft: it takes memory rows."""
        return self._rows.wanted

    @property
    def room(self) -> int | None:
        """Tokens that the answer may still have; None without a limit."""
        return max(0, self._max_length - len(self.committed)) if self._max_length else None

    @property
    def continues_without_client(self) -> bool:
        """Whether an answer runs that is to be finished while the client is away."""
        return self._while_away and self.runs

    def next_work(self, *, rows: bool = True) -> Verify | RowsWork | None:
        """What the engine is to do for a client that waits: the next tokens within its credit, or memory rows.

        Args:
            rows: whether they may be made now.
        """
        lacking = self._rows_end - self._rows.next if rows and self._makes_rows else 0
        if self.pushes and not (self._rows_turn and lacking >= _ROWS_TOGETHER):
            return self._work(pushed=True)
        self._rows_turn = False
        if lacking < 1:
            return None
        end = min(self._rows_end, self._rows.next + _MOST_ROWS)
        return RowsWork(tuple(self.committed[:end]), self._rows.next)

    def next_background_work(self) -> Verify | None:
        """While the client is away: the work for the next token, if there is any."""
        return self._work(pushed=True) if self.continues_without_client else None

    def engine_failed(self) -> bool:
        """The engine failed on what was done unasked: memory rows wait for the client's next frame.

        Returns:
            whether the client awaits verdicts: it is to hear a fault, and lends its credit once more.
        """
        pushed, self._credit, self._stands = self.pushes, 0, True
        return pushed

    @property
    def rows_due(self) -> bool:
        """Whether there are memory rows to be made or sent."""
        return self._makes_rows and self._rows.sent < self._rows_end

    def take_rows(self) -> wire.ServerMessage | None:
        """Memory rows to be sent now, if there are any; behind a pushed verdict only a few."""
        if not self.pushes:
            return self._rows.take(_MOST_ROWS, self._epoch)
        of_prompt = self._rows.sent < (self._answer_start or 0)
        return self._rows.take(_PROMPT_ROWS_BEHIND_PUSHED if of_prompt else _ROWS_BEHIND_PUSHED, self._epoch)

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Memory rows that the engine made, float32 ``[n, kv_heads, head_dim]`` from position ``start`` on."""
        self._rows.add(start, keys, values, self._rows_end)

    def disable_rows(self) -> None:
        """The engine makes none."""
        self._rows.none_come()

    # -- helpers -------------------------------------------------------------------------------

    @property
    def _rows_end(self) -> int:
        """Of what the client knows; the last token has none: the target has not processed it."""
        return self._told - 1

    @property
    def _makes_rows(self) -> bool:
        """Not for who only connects: a cache that was lost would be computed again, perhaps for nobody."""
        return self._rows.wanted and self._asked and not self._stands

    def _cut(self, length: int) -> None:
        """No answer runs behind what is left."""
        self._while_away, self._credit = False, 0
        del self.committed[length:]
        self._rows.cut(length)
        self._told = min(self._told, length)
        self._answer_start = self._finish = None

    def _work(
        self,
        draft: tuple[int, ...] = (),
        parents: tuple[int, ...] = (),
        *,
        rows_from: int | None = None,
        supplied: int = 0,
        pushed: bool = False,
    ) -> Verify:
        return Verify(tuple(self.committed), draft, parents, self._sampling, rows_from, supplied, pushed)
