"""The statistics of an answer: in words, and as two drawings of the latest rounds."""

from __future__ import annotations

import statistics as stats
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Appearance, lines
from moa_runtime.events import FinishReason, Statistics

#: Of an answer that the device wrote, and that the user kept or the verifier refused.
AS_WRITTEN = "as this device wrote it, not confirmed"
_RECENT_TRIPS = 8
_FINISH = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut off at the length limit",
    FinishReason.CONTEXT: "the target's context is full",
}
_ROUNDS = 80


@dataclass(frozen=True)
class Figure:
    """One figure of the panel, with what it means."""

    text: str
    meaning: str


@dataclass(frozen=True)
class Round:
    """One or more rounds that were seen together: seconds, and tokens committed in each of them."""

    round_trip_s: float
    committed: float


def round_trip(statistics: Statistics) -> float:
    """Return the median of the latest round trips in seconds, 0 without any: network and target together."""
    return stats.median(statistics.round_trips[-_RECENT_TRIPS:]) if statistics.round_trips else 0.0


def figures(statistics: Statistics, words_a_token: float) -> list[Figure]:
    """Return the figures of an answer. Speed is in words, which a person counts; tokens are called pieces of words."""
    speed = words_a_token * generation_speed(statistics)
    shown = [Figure(f"{speed:.1f} words a second", "after the first ones")]
    if statistics.first_token_seconds is not None:
        shown.append(Figure(f"first word after {statistics.first_token_seconds:.2f} s", "from the question to it"))
    for who, drafted, accepted in (
        ("this device", statistics.drafted, statistics.accepted),
        ("the server", statistics.server_drafted, statistics.server_accepted),
    ):
        if drafted:
            says = f"{accepted} of {drafted} pieces of words drafted by {who} were right"
            shown.append(Figure(says, "the others were corrected before they counted"))
    if statistics.rounds:
        written = statistics.tokens - statistics.kept - statistics.fetched + statistics.taken_back
        says = f"{written} pieces of words in {statistics.rounds} passes of the model"
        shown.append(Figure(says, f"without drafts it would be a pass for each; τ = {statistics.tau:.2f}"))
    if statistics.round_trips:
        waited = f"{1000 * round_trip(statistics):.0f} ms"
        if statistics.server_drafts:
            shown.append(Figure(f"something new every {waited}", "the server drafts now, and continues on its own"))
        else:
            shown.append(Figure(f"an answer from the server after {waited}", "network and model together"))
    shown.append(
        Figure(
            f"{_size(statistics.bytes_up)} sent, {_size(statistics.bytes_down)} received", "in total for this answer"
        )
    )
    return shown


def generation_speed(statistics: Statistics) -> float:
    """Return tokens per second after the first verdict, whose waiting time is shown separately; 0 before the second."""
    seconds = statistics.seconds - (statistics.first_token_seconds or 0.0)
    return max(statistics.tokens - 1, 0) / seconds if seconds > 0 else 0.0


def new_round(before: Statistics, after: Statistics) -> Round | None:
    """Return the rounds between two snapshots of one answer as one; None if there were none."""
    rounds = after.rounds - before.rounds
    if rounds <= 0 or not after.round_trips:
        return None
    return Round(after.round_trips[-1], (after.tokens - before.tokens) / rounds)


def summary(statistics: Statistics, reason: FinishReason | None) -> str:
    """Return the remarks below an answer; ``reason`` is None if it was stopped."""
    kept, offline = statistics.kept, statistics.offline
    parts = [
        "stopped" if reason is None else _FINISH[reason],
        ("" if kept == statistics.tokens else "partly ") + AS_WRITTEN if kept else "",
        "partly written offline" if offline > kept else "",
        "corrected by the server" if offline and statistics.rolled_back and not kept else "",
    ]
    return " · ".join(part for part in parts if part)


def _size(count: float) -> str:
    """Return bytes in the unit that reads best: ``_size(12_300)`` is ``"12 kB"``."""
    if count < 1e3:
        return f"{count:.0f} B"
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB"


class FiguresLabel(QLabel):
    """The running or last answer in figures; the tooltip says what they mean."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("figures")
        self.setAccessibleName("Figures of the answer")
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setWordWrap(True)
        self.setText("Figures come with the next answer.")

    def show_figures(self, figures: Sequence[Figure]) -> None:
        # Lines break between figures, not in them.
        self.setText("  · ".join(figure.text.replace(" ", "\N{NO-BREAK SPACE}") for figure in figures))
        self.setToolTip("\n".join(f"{figure.text}: {figure.meaning}" for figure in figures))


class RoundPlot(QFrame):
    """Draws the latest rounds, the newest at the right.

    Attributes:
        figures: of the answer, below the drawings.
    """

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("panel")
        self._rounds: deque[Round] = deque(maxlen=_ROUNDS)
        self.round_trips = _Chart(appearance, "Time of a round", "ms", "accent", line=True)
        self.confirmed = _Chart(appearance, "Pieces of words confirmed in a round", "", "drafted", line=False)
        self.figures = FiguresLabel()
        charts = QHBoxLayout()
        charts.setSpacing(lines(1.5))
        charts.addWidget(self.round_trips)
        charts.addWidget(self.confirmed)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(lines(1), lines(0.5), lines(1), lines(0.5))
        layout.setSpacing(lines(0.4))
        layout.addLayout(charts)
        layout.addWidget(self.figures)

    def add(self, one: Round) -> None:
        self._rounds.append(one)
        self.round_trips.show_values(1000 * each.round_trip_s for each in self._rounds)
        self.confirmed.show_values(each.committed for each in self._rounds)


class _Chart(QWidget):
    """Values from left to right, as a line or as bars, with the largest and the newest one in words."""

    def __init__(self, appearance: Appearance, title: str, unit: str, color: str, *, line: bool) -> None:
        super().__init__()
        self._appearance, self._title, self._unit, self._color = appearance, title, unit, color
        self._draw: Callable[[QPainter, QRectF, float], None] = self._draw_line if line else self._draw_bars
        self._values: list[float] = []
        self.setAccessibleName(title)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        appearance.changed.connect(self.updateGeometry)

    def show_values(self, values: Iterable[float]) -> None:
        self._values = list(values)
        self.setAccessibleDescription(self._in_words())
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(lines(12), lines(5))

    def paintEvent(self, event: QPaintEvent) -> None:
        theme, row = self._appearance.theme, lines(1.2)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QColor(theme.muted))
        heading = QRectF(0, 0, self.width(), row)
        painter.drawText(heading, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, self._title)
        painter.drawText(heading, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, self._in_words())
        area = QRectF(0, row + 2, self.width(), self.height() - row - 3)
        painter.setPen(QPen(QColor(theme.border), 1))
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        if self._values:
            self._draw(painter, area, max(max(self._values), 1e-9))
        painter.end()

    def _draw_line(self, painter: QPainter, area: QRectF, largest: float) -> None:
        step = area.width() / (_ROUNDS - 1)
        start = area.right() - step * (len(self._values) - 1)
        points = [
            QPointF(start + step * number, area.bottom() - area.height() * value / largest)
            for number, value in enumerate(self._values)
        ]
        painter.setPen(QPen(QColor(getattr(self._appearance.theme, self._color)), 1.6))
        painter.drawPolyline(QPolygonF(points))
        painter.setBrush(QColor(getattr(self._appearance.theme, self._color)))
        painter.drawEllipse(points[-1], 2.2, 2.2)

    def _draw_bars(self, painter: QPainter, area: QRectF, largest: float) -> None:
        step = area.width() / _ROUNDS
        start = area.right() - step * len(self._values)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(getattr(self._appearance.theme, self._color)))
        for number, value in enumerate(self._values):
            height = area.height() * value / largest
            bar = QRectF(start + step * number, area.bottom() - height, max(step - 2, 1), height)
            painter.drawRoundedRect(bar, 1, 1)

    def _in_words(self) -> str:
        if not self._values:
            return "none yet"
        unit = f" {self._unit}" if self._unit else ""
        return f"now {_figure(self._values[-1])}{unit}, at most {_figure(max(self._values))}{unit}"


def _figure(value: float) -> str:
    """Format a value with three digits and no powers of ten: ``2500``, ``14.2``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
