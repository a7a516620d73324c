"""The settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QLabel,
    QLineEdit,
    QScrollArea,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from moa_chat.desktop.connection_form import ConnectionForm
from moa_chat.desktop.connector import Connector
from moa_chat.desktop.look import ZOOMS
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.style import letters, lines

_THEMES = {"system": "As the system", "light": "Light", "dark": "Dark"}
_DISAGREEMENTS = {"ask": "Ask", "theirs": "Use the server's version", "mine": "Keep what this device wrote"}


def _lengths(settings: Settings) -> dict[int, str]:
    """The one that is set is among them, wherever it comes from."""
    return {length: f"{length} tokens" for length in sorted({256, 512, 1024, 2048, 4096, settings.max_new_tokens})}


def _temperatures(settings: Settings) -> dict[float, str]:
    likeliest = {0.0: "0: always the likeliest word"}
    return {degree: likeliest.get(degree, str(degree)) for degree in sorted({0.0, 0.3, 0.7, 1.0, settings.temperature})}


class SettingsDialog(QDialog):
    """Signals:
    saved: the settings as they are now.
    """

    saved = Signal(object)

    def __init__(self, connector: Connector, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Settings")
        self._settings = settings
        self.form = ConnectionForm(connector, settings)
        self.theme = _Choice("Theme", _THEMES, settings.theme)
        self.zoom = _Choice("Size of the letters", {zoom: f"{zoom} %" for zoom in ZOOMS}, settings.zoom)
        self.disagreement = _Choice("When the server disagrees", _DISAGREEMENTS, settings.disagreement)
        self.system = QLineEdit(settings.system)
        self.system.setPlaceholderText("none")
        self.system.setAccessibleName("Instructions to the model")
        self.max_new_tokens = _Choice("Longest answer", _lengths(settings), settings.max_new_tokens)
        self.temperature = _Choice("Temperature", _temperatures(settings), settings.temperature)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Save | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.save)
        buttons.rejected.connect(self.reject)
        tabs = QTabWidget()
        tabs.setAccessibleName("Parts of the settings")
        tabs.addTab(_scrolling(self.form), "Connection")
        tabs.addTab(self._answers(), "Answers")
        tabs.addTab(self._appearance(), "Appearance")
        layout = QVBoxLayout(self)
        layout.addWidget(tabs)
        layout.addWidget(buttons)
        self.resize(letters(78), lines(30))

    def _answers(self) -> QWidget:
        page = QWidget()
        form = QFormLayout(page)
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        form.setSpacing(lines(0.6))
        form.setContentsMargins(lines(1), lines(1), lines(1), lines(1))
        form.addRow("Instructions", self.system)
        form.addRow("Longest answer", self.max_new_tokens)
        form.addRow("Temperature", self.temperature)
        form.addRow("When the server disagrees", self.disagreement)
        note = QLabel("with text that this device wrote offline")
        note.setObjectName("muted")
        form.addRow("", note)
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
                system=self.system.text().strip(),
                max_new_tokens=self.max_new_tokens.currentData(),
                temperature=self.temperature.currentData(),
            )
        )
        self.accept()


class _Choice(QComboBox):
    """One of some values.

    Args:
        choices: each value and its name.
    """

    def __init__(self, says: str, choices: Mapping[Any, str], current: object) -> None:
        super().__init__()
        self.setAccessibleName(says)
        for value, name in choices.items():
            self.addItem(name, value)
        self.setCurrentIndex(max(0, self.findData(current)))

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        # A style sheet takes the arrow away, and would take another one only from a file.
        painter = QPainter(self)
        place = self.rect().adjusted(0, 0, -lines(0.6), 0)
        painter.drawText(place, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, "▾")
        painter.end()


def _scrolling(page: QWidget) -> QScrollArea:
    area = QScrollArea()
    area.setAccessibleName("Connection")
    area.setWidgetResizable(True)
    held = QWidget()
    layout = QVBoxLayout(held)
    layout.setContentsMargins(lines(1), lines(1), lines(1), lines(1))
    layout.addWidget(page)
    layout.addStretch()
    area.setWidget(held)
    return area
