"""The page of the first start: where the server is, and a button to begin."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, letters, lines
from moa_chat.desktop.connection import Connector
from moa_chat.desktop.connection_form import ConnectionForm
from moa_chat.desktop.notices import ProgressStrip
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.widgets import add, centered, label, pad, pixmap, push_button
from moa_runtime.errors import MoaError

_WIDTH = 70


class FirstRun(QScrollArea):
    """The page of the first start."""

    wanted = Signal(object)  # the settings to connect with
    cancelled = Signal()  # the user cancels the connection

    def __init__(self, appearance: Appearance, connector: Connector, settings: Settings) -> None:
        super().__init__()
        self._appearance = appearance
        self.setObjectName("conversation")
        self.setAccessibleName(strings.WELCOME)
        self.setWidgetResizable(True)
        self._mark = QLabel()
        self.form = ConnectionForm(connector, settings)
        self.start = push_button(
            strings.START_CHATTING, lambda: self.wanted.emit(self.form.settings()), style="primary"
        )
        self.start.setDefault(True)
        self.form.server.returnPressed.connect(self.start.click)
        self.progress = ProgressStrip()
        self._held = QWidget()
        column = self._column = QVBoxLayout(self._held)
        column.setSpacing(lines(0.6))
        headline = label(strings.WELCOME_HEADLINE, "headline", wraps=False)
        add(column, self._mark, headline, label(strings.WELCOME_LEAD, "muted"))
        column.addSpacing(lines(0.8))
        column.addWidget(self.form)
        column.addSpacing(lines(0.8))
        row = QHBoxLayout()
        row.addWidget(self.start)
        row.addStretch()
        column.addLayout(row)
        column.addWidget(self.progress)
        column.addStretch()
        page = QWidget()
        page.setObjectName("column")
        page.setLayout(centered(self._held))
        self.setWidget(page)
        appearance.changed.connect(self._refresh)
        self._refresh()

    def show_progress(self, words: str, part: float | None = None) -> None:
        """Show what is being done, with the seconds that it takes, in place of the button; ``part`` of it is done."""
        self.form.setEnabled(False)
        self.form.show_progress("")
        self.start.hide()
        self.progress.begin(words, self.cancelled.emit, part)

    def show_problem(self, error: MoaError) -> None:
        """Show why there is no connection, and the button again."""
        self.form.setEnabled(True)
        self.start.show()
        self.progress.end()
        self.form.show_problem(error)

    def _refresh(self) -> None:
        self._held.setMaximumWidth(letters(_WIDTH))
        self._mark.setPixmap(pixmap("mark", self._appearance.theme.accent, lines(2.6), self.devicePixelRatioF()))
        pad(self._column, 2)
