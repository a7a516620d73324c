"""Theme and size of the letters as they are now, for widgets that draw or render with them."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication

from moa_chat.desktop.style import style_sheet, text_font
from moa_chat.desktop.theme import Theme, theme_for

ZOOMS = (100, 110, 125, 150, 175, 200)


class Look(QObject):
    """Applies theme and zoom to the application, and says when they change.

    Attributes:
        theme: the colours in use.
        zoom: size of the letters in percent.
        origins: whether answers are coloured by origin.
    """

    changed = Signal()

    def __init__(self, theme: str = "system", zoom: int = 100, *, origins: bool = False) -> None:
        super().__init__()
        self._name = theme
        self.theme: Theme = theme_for(theme)
        self.zoom = zoom
        self.origins = origins
        self._apply()
        QGuiApplication.styleHints().colorSchemeChanged.connect(lambda _: self.set_theme(self._name))

    def set_theme(self, name: str) -> None:
        """``system`` follows the desktop from now on."""
        self._name, self.theme = name, theme_for(name)
        self._apply()

    def set_zoom(self, zoom: int) -> None:
        self.zoom = zoom
        self._apply()

    def step_zoom(self, step: int) -> None:
        """The next larger (1) or smaller (-1) size."""
        nearest = min(range(len(ZOOMS)), key=lambda i: abs(ZOOMS[i] - self.zoom))
        self.set_zoom(ZOOMS[min(max(nearest + step, 0), len(ZOOMS) - 1)])

    def set_origins(self, shown: bool) -> None:
        self.origins = shown
        self.changed.emit()

    def _apply(self) -> None:
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        application.setFont(text_font(self.zoom))
        application.setPalette(self.theme.palette())
        application.setStyleSheet(style_sheet(self.theme))
        self.changed.emit()
