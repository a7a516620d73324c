"""The page of the first start: verifier, bundle, and a button to begin."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QScrollArea, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Appearance, letters, lines
from moa_chat.desktop.connection import Connector
from moa_chat.desktop.connection_form import ConnectionForm
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.widgets import pixmap
from moa_runtime.errors import MoaError

_WIDTH = 70


class FirstRun(QScrollArea):
    """The page of the first start.

    Signals:
        wanted: the settings to connect with.
        cancelled: the user cancels the connection.
    """

    wanted = Signal(object)
    cancelled = Signal()

    def __init__(
        self, appearance: Appearance, connector: Connector, settings: Settings, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._appearance = appearance
        self.setObjectName("conversation")
        self.setAccessibleName("Welcome")
        self.setWidgetResizable(True)
        self._mark = QLabel()
        headline = QLabel("Welcome to moa-chat")
        headline.setObjectName("headline")
        lead = QLabel(
            "A small model on this device writes ahead, a large one on a server checks every word. "
            "The answer continues when the network fails."
        )
        lead.setObjectName("muted")
        lead.setWordWrap(True)
        self.form = ConnectionForm(connector, settings)
        self.start = QPushButton("Start chatting")
        self.start.setObjectName("primary")
        self.start.setDefault(True)
        self.start.clicked.connect(self._begin)
        self.cancel = QPushButton("Cancel")
        self.cancel.clicked.connect(lambda: self.cancelled.emit())
        self.cancel.hide()
        self.form.changed.connect(self._check)
        held = QWidget()
        self._held = held
        column = self._column = QVBoxLayout(held)
        column.setSpacing(lines(0.6))
        column.addWidget(self._mark)
        column.addWidget(headline)
        column.addWidget(lead)
        column.addSpacing(lines(0.8))
        column.addWidget(self.form)
        column.addSpacing(lines(0.8))
        row = QHBoxLayout()
        row.addWidget(self.start)
        row.addWidget(self.cancel)
        row.addStretch()
        column.addLayout(row)
        column.addStretch()
        page = QWidget()
        page.setObjectName("column")
        centered = QHBoxLayout(page)
        centered.addStretch(1)
        centered.addWidget(held, 100)
        centered.addStretch(1)
        self.setWidget(page)
        appearance.changed.connect(self._refresh)
        self._refresh()
        self._check()

    def show_progress(self, words: str, *, can_cancel: bool = False) -> None:
        self.start.setEnabled(False)
        self.cancel.setVisible(can_cancel)
        self.form.show_progress(words)

    def show_problem(self, error: MoaError) -> None:
        self.cancel.hide()
        self.form.show_problem(error)
        self._check()

    def _begin(self) -> None:
        self.wanted.emit(self.form.settings())

    def _check(self) -> None:
        self.start.setEnabled(self.form.settings().ready and self.form.bundle.present)

    def _refresh(self) -> None:
        self._held.setMaximumWidth(letters(_WIDTH))
        self._mark.setPixmap(pixmap("mark", self._appearance.theme.accent, lines(2.6), self.devicePixelRatioF()))
        margin = lines(2)
        self._column.setContentsMargins(margin, margin, margin, margin)
