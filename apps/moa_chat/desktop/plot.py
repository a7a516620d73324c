"""How an answer is made: two small drawings of the latest rounds, and its figures in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.stats_panel import Figure, Round
from moa_chat.desktop.style import lines

_ROUNDS = 80


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
    """Takes rounds as they come; the newest is at the right.

    Attributes:
        figures: of the answer, below the drawings.
    """

    def __init__(self, look: Look, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("panel")
        self._rounds: deque[Round] = deque(maxlen=_ROUNDS)
        self.round_trips = _Chart(look, "Time of a round", "ms", "accent", line=True)
        self.confirmed = _Chart(look, "Pieces of words confirmed in a round", "", "drafted", line=False)
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

    def __init__(self, look: Look, title: str, unit: str, color: str, *, line: bool) -> None:
        super().__init__()
        self._look, self._title, self._unit, self._color = look, title, unit, color
        self._draw: Callable[[QPainter, QRectF, float], None] = self._draw_line if line else self._draw_bars
        self._values: list[float] = []
        self.setAccessibleName(title)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        look.changed.connect(self.updateGeometry)

    def show_values(self, values: Iterable[float]) -> None:
        self._values = list(values)
        self.setAccessibleDescription(self._in_words())
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(lines(12), lines(5))

    def paintEvent(self, event: QPaintEvent) -> None:
        theme, row = self._look.theme, lines(1.2)
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
        painter.setPen(QPen(QColor(getattr(self._look.theme, self._color)), 1.6))
        painter.drawPolyline(QPolygonF(points))
        painter.setBrush(QColor(getattr(self._look.theme, self._color)))
        painter.drawEllipse(points[-1], 2.2, 2.2)

    def _draw_bars(self, painter: QPainter, area: QRectF, largest: float) -> None:
        step = area.width() / _ROUNDS
        start = area.right() - step * len(self._values)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(getattr(self._look.theme, self._color)))
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
    """Three digits, and no powers of ten: ``2500``, ``14.2``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
