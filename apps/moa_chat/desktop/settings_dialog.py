"""The settings."""

from __future__ import annotations

import dataclasses

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QLabel,
    QScrollArea,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from moa_chat.desktop.appearance import ZOOMS
from moa_chat.desktop.chat_settings import ChatSettingsForm
from moa_chat.desktop.combo_box import Choice
from moa_chat.desktop.connection_form import ConnectionForm
from moa_chat.desktop.connector import Connector
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.style import letters, lines
from moa_runtime.generation_config import RecommendedSampling

_THEMES = {"system": "As the system", "light": "Light", "dark": "Dark"}
_DISAGREEMENTS = {"ask": "Ask", "theirs": "Use the server's version", "mine": "Keep what this device wrote"}


class SettingsDialog(QDialog):
    """The settings of the program, and of new chats.

    Args:
        recommended: by the bundle in use.

    Signals:
        saved: the Settings as they are now.
    """

    saved = Signal(object)

    def __init__(
        self,
        connector: Connector,
        settings: Settings,
        recommended: RecommendedSampling | None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle("Settings")
        self._settings = settings
        self.form = ConnectionForm(connector, settings)
        self.theme = Choice("Theme", _THEMES, settings.theme)
        self.zoom = Choice("Size of the letters", {zoom: f"{zoom} %" for zoom in ZOOMS}, settings.zoom)
        self.disagreement = Choice("When the server disagrees", _DISAGREEMENTS, settings.disagreement)
        self.of_chats = ChatSettingsForm(settings, recommended)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Save | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.save)
        buttons.rejected.connect(self.reject)
        tabs = QTabWidget()
        tabs.setAccessibleName("Parts of the settings")
        tabs.addTab(_scrolling(self.form, "Connection"), "Connection")
        tabs.addTab(_scrolling(self._answers(), "Answers"), "Answers")
        tabs.addTab(self._appearance(), "Appearance")
        layout = QVBoxLayout(self)
        layout.addWidget(tabs)
        layout.addWidget(buttons)
        self.resize(letters(78), lines(30))

    def _answers(self) -> QWidget:
        page = QWidget()
        layout = QVBoxLayout(page)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(lines(0.8))
        note = QLabel("New chats begin with this. A chat that has begun has settings of its own.")
        note.setObjectName("muted")
        note.setWordWrap(True)
        form = QFormLayout()
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        form.setSpacing(lines(0.6))
        form.addRow("When the server disagrees", self.disagreement)
        with_what = QLabel("with text that this device wrote offline, in all chats")
        with_what.setObjectName("muted")
        form.addRow("", with_what)
        layout.addWidget(note)
        layout.addWidget(self.of_chats)
        layout.addLayout(form)
        return page

    def _appearance(self) -> QWidget:
        page = QWidget()
        form = QFormLayout(page)
        form.setSpacing(lines(0.6))
        form.setContentsMargins(lines(1), lines(1), lines(1), lines(1))
        form.addRow("Theme", self.theme)
        form.addRow("Size of the letters", self.zoom)
        return page

    def save(self) -> None:
        """Give the settings away, and close."""
        self.saved.emit(
            dataclasses.replace(
                self.form.settings(),
                theme=self.theme.currentData(),
                zoom=self.zoom.currentData(),
                disagreement=self.disagreement.currentData(),
                **dataclasses.asdict(self.of_chats.settings()),
            )
        )
        self.accept()


def _scrolling(page: QWidget, says: str) -> QScrollArea:
    area = QScrollArea()
    area.setAccessibleName(says)
    area.setWidgetResizable(True)
    held = QWidget()
    layout = QVBoxLayout(held)
    layout.setContentsMargins(lines(1), lines(1), lines(1), lines(1))
    layout.addWidget(page)
    layout.addStretch()
    area.setWidget(held)
    return area
