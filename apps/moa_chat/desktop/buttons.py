"""Buttons that are an icon: each with a name for screen readers and a tooltip."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtWidgets import QToolButton, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.icons import icon
from moa_chat.desktop.style import lines

_DONE_MS = 1500


class IconButton(QToolButton):
    """A button with one of :mod:`moa_chat.desktop.icons`, redrawn when the theme changes.

    Args:
        name: of the icon.
        says: what the button does, for the tooltip and screen readers.
        shortcut: shown in the tooltip; the window's actions make it work.
        label: a word beside the icon, while :meth:`show_label` does not say otherwise.
        color: name of a colour of the theme.
    """

    def __init__(
        self,
        look: Look,
        name: str,
        says: str,
        clicked: Callable[[], None] | None = None,
        *,
        shortcut: str = "",
        label: str = "",
        color: str = "muted",
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._look, self._icon, self._color = look, name, color
        self.setText(f" {label}" if label else "")  # the style leaves no room between icon and word
        self.show_label(bool(label))
        self.setAccessibleName(says)
        keys = QKeySequence(shortcut).toString(QKeySequence.SequenceFormat.NativeText)
        self.setToolTip(f"{says} ({keys})" if keys else says)
        if clicked is not None:
            self.clicked.connect(lambda _: clicked())
        look.changed.connect(self.redraw)
        self.redraw()

    def set_icon(self, name: str, says: str) -> None:
        """Become another button."""
        self._icon = name
        self.setAccessibleName(says)
        self.setToolTip(says)
        self.redraw()

    def show_label(self, shown: bool) -> None:
        """Whether there is room for the word beside the icon."""
        beside, alone = Qt.ToolButtonStyle.ToolButtonTextBesideIcon, Qt.ToolButtonStyle.ToolButtonIconOnly
        self.setToolButtonStyle(beside if shown else alone)

    def width_without_label(self) -> int:
        """What the icon alone takes."""
        if self.toolButtonStyle() is Qt.ToolButtonStyle.ToolButtonIconOnly:
            return self.sizeHint().width()
        return self.sizeHint().width() - self.fontMetrics().horizontalAdvance(self.text())

    def redraw(self) -> None:
        theme = self._look.theme
        self.setIcon(icon(self._icon, getattr(theme, self._color), theme.muted))
        self.setIconSize(QSize(lines(0.95), lines(0.95)))


class CopyButton(IconButton):
    """Copies a text and shows for a moment that it did.

    Args:
        text: called for what is to be copied.
    """

    def __init__(
        self, look: Look, says: str, text: Callable[[], str], *, label: str = "", parent: QWidget | None = None
    ) -> None:
        super().__init__(look, "copy", says, self.copy, label=label, parent=parent)
        self._text = text

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(self._text())
        self._icon, self._color = "done", "good"
        self.redraw()
        QTimer.singleShot(_DONE_MS, self, self._reset)

    def _reset(self) -> None:
        self._icon, self._color = "copy", "muted"
        self.redraw()
