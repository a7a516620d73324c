"""The statistics of an answer: in words, and as two drawings of the latest rounds."""

from __future__ import annotations

import statistics as stats
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, lines
from moa_chat.desktop.widgets import add, label, pad
from moa_runtime.events import FinishReason, Origin, Statistics, TextSpan

_RECENT_TRIPS = 8
_ROUNDS = 80


@dataclass(frozen=True)
class Round:
    """One or more rounds that were seen together: seconds, and tokens committed in each of them."""

    round_trip_s: float
    committed: float


def round_trip(statistics: Statistics) -> float:
    """Return the median of the latest round trips in seconds, 0 without any: network and target together."""
    return stats.median(statistics.round_trips[-_RECENT_TRIPS:]) if statistics.round_trips else 0.0


def figures(statistics: Statistics, words_a_token: float) -> list[tuple[str, str]]:
    """Return the figures of an answer, each with its meaning. Speed is in words."""
    shown: list[tuple[str, str]] = []

    def show(figure: tuple[str, str], *values: object) -> None:
        shown.append((figure[0].format(*values), figure[1].format(f"{statistics.tau:.2f}")))

    show(strings.SPEED, words_a_token * generation_speed(statistics))
    if statistics.first_token_seconds is not None:
        show(strings.FIRST_WORD, statistics.first_token_seconds)
    for who, drafted, accepted in (
        (strings.THIS_DEVICE, statistics.drafted, statistics.accepted),
        (strings.THE_SERVER, statistics.server_drafted, statistics.server_accepted),
    ):
        if drafted:
            show(strings.DRAFTED, accepted, drafted, who)
    if statistics.rounds:
        written = statistics.tokens - statistics.kept - statistics.fetched + statistics.taken_back
        show(strings.PASSES, written, statistics.rounds)
    if statistics.round_trips:
        show(strings.STREAMED if statistics.streamed else strings.ROUND_TRIP, 1000 * round_trip(statistics))
    if statistics.dtype:
        show(strings.NUMBERS, statistics.dtype)
    show(strings.TRAFFIC, _size(statistics.bytes_up), _size(statistics.bytes_down))
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


def summary(statistics: Statistics, reason: FinishReason | None, spans: Iterable[TextSpan]) -> str:
    """Return the remarks below an answer; ``reason`` is None if it was stopped.

    Tokens without text, such as half a character that the server completed, are in the statistics, but on no screen:
    ``spans`` tell whether any of the text was written offline.
    """
    kept, offline = statistics.kept, statistics.offline
    parts = [strings.STOPPED if reason is None else strings.FINISH[reason]]
    if kept:
        parts.append(strings.AS_WRITTEN if kept == statistics.tokens else strings.PARTLY_AS_WRITTEN)
    if any(span.origin is Origin.OFFLINE and span.text.strip() for span in spans):
        parts.append(strings.PARTLY_OFFLINE)
    if statistics.dropped_turns:
        parts.append(strings.WITHOUT_OLDEST.format(statistics.dropped_turns))
    if offline and statistics.rolled_back and not kept:
        parts.append(strings.CORRECTED)
    return " · ".join(part for part in parts if part)


def _size(count: float) -> str:
    """Return bytes in the unit that reads best: ``_size(12_300)`` is ``"12 kB"``."""
    if count < 1e3:
        return f"{count:.0f} B"
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB"


class RoundPlot(QFrame):
    """Draws the latest rounds, the newest at the right, with the figures of the running or last answer below."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self.setObjectName("panel")
        self._rounds: deque[Round] = deque(maxlen=_ROUNDS)
        self.round_trips = _Chart(appearance, strings.ROUND_TIMES, " ms", "accent", line=True)
        self.confirmed = _Chart(appearance, strings.ROUND_TOKENS, "", "drafted", line=False)
        self.figures = label(strings.FIGURES_LATER, "figures", says=strings.FIGURES_NAME)
        self.figures.setAlignment(Qt.AlignmentFlag.AlignCenter)
        charts = QHBoxLayout()
        charts.setSpacing(lines(1.5))
        add(charts, self.round_trips, self.confirmed)
        layout = QVBoxLayout(self)
        pad(layout, 1, 0.5, 1, 0.5, spacing=0.4)
        layout.addLayout(charts)
        layout.addWidget(self.figures)

    def add(self, one: Round) -> None:
        self._rounds.append(one)
        self.round_trips.show_values(1000 * each.round_trip_s for each in self._rounds)
        self.confirmed.show_values(each.committed for each in self._rounds)

    def show_figures(self, figures: Sequence[tuple[str, str]]) -> None:
        # Lines break between figures, not in them.
        self.figures.setText("  · ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text, _ in figures))
        self.figures.setToolTip("\n".join(f"{text}: {meaning}" for text, meaning in figures))


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
        color = QColor(getattr(self._appearance.theme, self._color))
        painter.setPen(QPen(color, 1.6))
        painter.drawPolyline(QPolygonF(points))
        painter.setBrush(color)
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
            return strings.CHART_EMPTY
        newest, most = (f"{_figure(value)}{self._unit}" for value in (self._values[-1], max(self._values)))
        return strings.CHART_VALUES.format(newest, most)


def _figure(value: float) -> str:
    """Format a value with three digits and no powers of ten: ``2500``, ``14.2``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
