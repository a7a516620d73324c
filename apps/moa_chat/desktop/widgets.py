"""Labels, buttons and icons of the window, each with a name for screen readers, and their layout."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from PySide6.QtCore import QByteArray, QRectF, QSize, Qt, QTimer
from PySide6.QtGui import QGuiApplication, QIcon, QKeySequence, QPainter, QPaintEvent, QPalette, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import (
    QBoxLayout,
    QCheckBox,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QStyle,
    QStyleOptionButton,
    QToolButton,
    QWidget,
)

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, lines

#: SVG content in a square of 24 by 24.
_DRAWINGS = {
    "new": '<path d="M12 5v14M5 12h14"/>',
    "search": '<circle cx="11" cy="11" r="6"/><path d="M15.5 15.5L20 20"/>',
    "send": '<path d="M12 19V5M6 11l6-6 6 6"/>',
    "stop": '<rect x="7" y="7" width="10" height="10" rx="2" fill="{color}"/>',
    "copy": '<rect x="9" y="9" width="11" height="11" rx="2"/>'
    '<path d="M15 9V6a2 2 0 0 0-2-2H6a2 2 0 0 0-2 2v7a2 2 0 0 0 2 2h3"/>',
    "done": '<path d="M5 12.5l4.5 4.5L19 7.5"/>',
    "again": '<path d="M19 12a7 7 0 1 1-2.2-5.1M19 4v4.5h-4.5"/>',
    "continue": '<path d="M5 12h13M13 7l5 5-5 5"/>',
    "edit": '<path d="M4 20l1-4L16 5l3 3L8 19zM14 7l3 3"/>',
    "delete": '<path d="M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5"/>',
    "settings": '<path d="M4 7h9M17 7h3M4 17h3M11 17h9"/><circle cx="15" cy="7" r="2"/><circle cx="9" cy="17" r="2"/>',
    "chat-settings": '<path d="M5 4h14a1 1 0 0 1 1 1v11a1 1 0 0 1-1 1h-8l-4 4v-4H5a1 1 0 0 1-1-1V5a1 1 0 0 1 1-1z"/>'
    '<path d="M8 10.5h3M15 10.5h1"/><circle cx="13" cy="10.5" r="2"/>',
    "export": '<path d="M12 4v11M7.5 10.5L12 15l4.5-4.5M5 19h14"/>',
    "offline": '<path d="M4 4l16 16M8.5 15.5a5 5 0 0 1 5-1.3M5 12a10 10 0 0 1 5-2.7M14 9.4a10 10 0 0 1 5 2.6"/>'
    '<circle cx="12" cy="19" r="1" fill="{color}"/>',
    "origins": '<path d="M4 18h7M4 12h16M4 6h10"/><circle cx="17" cy="18" r="2.5" fill="{color}"/>',
    "plot": '<path d="M4 19h16M6 15l4-5 4 3 5-8"/>',
    "down": '<path d="M12 5v14M6 13l6 6 6-6"/>',
    "up": '<path d="M12 19V5M6 11l6-6 6 6"/>',
    "close": '<path d="M6 6l12 12M18 6L6 18"/>',
    "sidebar": '<rect x="4" y="5" width="16" height="14" rx="2"/><path d="M10 5v14"/>',
    "mark": '<path d="M5 18V8l5 6 5-6v10" stroke-width="2.4"/>'
    '<circle cx="19" cy="17" r="1.8" fill="{color}" stroke="none"/>',
}
_FRAME = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke="{color}" stroke-width="1.7" '
    'stroke-linecap="round" stroke-linejoin="round">{drawing}</svg>'
)
_DONE_MS = 1500


def pixmap(name: str, color: str, size: int, scale: float = 1.0) -> QPixmap:
    """A drawing of ``size`` by ``size`` device-independent pixels; ``scale`` is the screen's pixel ratio."""
    drawing = _DRAWINGS[name].replace("{color}", color)
    svg = _FRAME.replace("{color}", color).replace("{drawing}", drawing)
    drawn = QPixmap(QSize(size, size) * scale)
    drawn.setDevicePixelRatio(scale)
    drawn.fill(Qt.GlobalColor.transparent)
    painter = QPainter(drawn)
    QSvgRenderer(QByteArray(svg.encode())).render(painter, QRectF(0, 0, size, size))
    painter.end()
    return drawn


def icon(name: str, color: str, disabled: str | None = None) -> QIcon:
    """An icon that is sharp on screens with up to twice the pixels."""
    made = QIcon()
    for size in (16, 20, 24, 32, 40, 48):
        made.addPixmap(pixmap(name, color, size, 2.0))
        made.addPixmap(pixmap(name, disabled or color, size, 2.0), QIcon.Mode.Disabled)
    return made


def plain_tip(text: str) -> str:
    """Return ``text`` for a tooltip, which would take text that looks like HTML for such."""
    return f'<p style="white-space: pre-wrap">{escape(text)}</p>' if text else ""


class PlainLabel(QLabel):
    """A label that takes neither its text nor its tooltip for HTML: both may be of a verifier or a model."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)

    def setToolTip(self, text: str) -> None:
        super().setToolTip(plain_tip(text))


def label(
    text: str = "", style: str = "", *, says: str = "", wraps: bool = True, selectable: bool = False
) -> PlainLabel:
    """Return a label; ``style`` is its name in the style sheet, ``says`` its name for screen readers."""
    made = PlainLabel(text)
    made.setObjectName(style)
    made.setAccessibleName(says)
    made.setWordWrap(wraps)
    if selectable:
        made.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return made


class CheckBox(QCheckBox):
    """A box with a tick, which a style sheet would take only from a file."""

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if not self.isChecked():
            return
        option = QStyleOptionButton()
        self.initStyleOption(option)
        box = self.style().subElementRect(QStyle.SubElement.SE_CheckBoxIndicator, option, self)
        color = self.palette().color(QPalette.ColorRole.HighlightedText).name()
        painter = QPainter(self)
        painter.drawPixmap(box.topLeft(), pixmap("done", color, box.width(), self.devicePixelRatioF()))
        painter.end()


def restyle(widget: QWidget, style: str) -> None:
    """Give a widget another name in the style sheet."""
    widget.setObjectName(style)
    widget.style().polish(widget)


def push_button(text: str, clicked: Callable[[], object], *, says: str = "", style: str = "") -> QPushButton:
    """Return a button; ``says`` is its name for screen readers, the text when omitted."""
    made = QPushButton(text)
    made.setAccessibleName(says)
    made.setObjectName(style)
    made.clicked.connect(lambda _: clicked())
    return made


def pad(layout: QLayout, *margins: float, spacing: float | None = None) -> None:
    """Set a layout's margins (one for all sides, or left, top, right, bottom) and its spacing, in lines of text."""
    layout.setContentsMargins(*(lines(each) for each in (margins * 4 if len(margins) == 1 else margins)))
    if spacing is not None:
        layout.setSpacing(lines(spacing))


def add(layout: QBoxLayout, *widgets: QWidget) -> None:
    """Add widgets to a layout, in this order."""
    for widget in widgets:
        layout.addWidget(widget)


def centered(widget: QWidget) -> QHBoxLayout:
    """Return a row with a widget in its middle, as wide as there is room, up to the widget's maximum."""
    row = QHBoxLayout()
    row.addStretch(1)
    row.addWidget(widget, 100)
    row.addStretch(1)
    return row


class IconButton(QToolButton):
    """A button with an icon, perhaps a word beside it, and a tooltip with the keys of the window's action."""

    def __init__(
        self,
        appearance: Appearance,
        name: str,
        says: str,
        clicked: Callable[[], object] | None = None,
        *,
        shortcut: str = "",
        word: str = "",
        color: str = "muted",
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._appearance, self._icon, self._color = appearance, name, color
        self.setText(f" {word}" if word else "")  # the style leaves no room between icon and word
        self.show_word(bool(word))
        self.setAccessibleName(says)
        keys = QKeySequence(shortcut).toString(QKeySequence.SequenceFormat.NativeText)
        self.setToolTip(f"{says} ({keys})" if keys else says)
        if clicked is not None:
            self.clicked.connect(lambda _: clicked())
        appearance.changed.connect(self.redraw)
        self.redraw()

    def set_icon(self, name: str, says: str) -> None:
        """Change icon and description."""
        self._icon = name
        self.setAccessibleName(says)
        self.setToolTip(says)
        self.redraw()

    def show_word(self, shown: bool) -> None:
        """Whether there is room for the word beside the icon."""
        beside, alone = Qt.ToolButtonStyle.ToolButtonTextBesideIcon, Qt.ToolButtonStyle.ToolButtonIconOnly
        self.setToolButtonStyle(beside if shown else alone)

    def width_without_word(self) -> int:
        """Return the width of the button without its word."""
        if self.toolButtonStyle() is Qt.ToolButtonStyle.ToolButtonIconOnly:
            return self.sizeHint().width()
        return self.sizeHint().width() - self.fontMetrics().horizontalAdvance(self.text())

    def redraw(self) -> None:
        theme = self._appearance.theme
        self.setIcon(icon(self._icon, getattr(theme, self._color), theme.muted))
        self.setIconSize(QSize(lines(0.95), lines(0.95)))


class CopyButton(IconButton):
    """Copies what ``text`` returns, and shows a check mark for a moment."""

    def __init__(self, appearance: Appearance, says: str, text: Callable[[], str]) -> None:
        super().__init__(appearance, "copy", says, self.copy, word=strings.COPY)
        self._text = text

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(self._text())
        self._show("done", "good")
        QTimer.singleShot(_DONE_MS, self, lambda: self._show("copy", "muted"))

    def _show(self, icon: str, color: str) -> None:
        self._icon, self._color = icon, color
        self.redraw()
