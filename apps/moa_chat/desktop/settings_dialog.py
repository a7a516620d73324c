"""The settings of the program, and those of one chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QDoubleSpinBox,
    QFormLayout,
    QLabel,
    QPlainTextEdit,
    QScrollArea,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from moa_chat.desktop.appearance import ZOOMS, letters, lines
from moa_chat.desktop.connection import Connector
from moa_chat.desktop.connection_form import ConnectionForm
from moa_chat.desktop.profile import Settings
from moa_chat.history.chat_settings import ChatSettings
from moa_runtime.bundle import RecommendedSampling

_THEMES = {"system": "As the system", "light": "Light", "dark": "Dark"}
_DISAGREEMENTS = {"ask": "Ask", "theirs": "Use the server's version", "mine": "Keep what this device wrote"}
_SYSTEM_LINES = 6
_HIGHEST_TEMPERATURE = 2.0


class ComboBox(QComboBox):
    """A list to choose from.

    Args:
        says: its name for screen readers.
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
        self.theme = ComboBox("Theme", _THEMES, settings.theme)
        self.zoom = ComboBox("Size of the letters", {zoom: f"{zoom} %" for zoom in ZOOMS}, settings.zoom)
        self.disagreement = ComboBox("When the server disagrees", _DISAGREEMENTS, settings.disagreement)
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
        note = QLabel("New chats begin with this. A chat in progress has settings of its own.")
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
        """Emit the settings, and close."""
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


class ChatSettingsForm(QWidget):
    """The settings of a chat as a form.

    Args:
        recommended: sampling that the bundle recommends; None if it recommends none.
    """

    def __init__(self, settings: ChatSettings, recommended: RecommendedSampling | None) -> None:
        super().__init__()
        self.system = QPlainTextEdit(settings.system)
        self.system.setObjectName("field")
        self.system.setPlaceholderText("none")
        self.system.setTabChangesFocus(True)
        self.system.setFixedHeight(lines(_SYSTEM_LINES))
        self.system.setAccessibleName("Instructions to the model")
        self.max_new_tokens = ComboBox("Longest answer", _lengths(settings), settings.max_new_tokens)
        self.recommended = QCheckBox("As the model's authors recommend")
        self.recommended.setChecked(settings.recommended)
        self._said = QLabel(_in_words(recommended))
        self._said.setObjectName("muted")
        self._said.setWordWrap(True)
        self.temperature = _number("Temperature: 0 always takes the likeliest word", 0.0, _HIGHEST_TEMPERATURE, 0.1)
        self.top_p = _number("Top-p: 1 leaves no word out", 0.05, 1.0, 0.05)
        self.temperature.setValue(settings.temperature)
        self.top_p.setValue(settings.top_p)
        self.recommended.toggled.connect(self._show_own)
        form = self._form = QFormLayout(self)
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        form.setContentsMargins(0, 0, 0, 0)
        form.setSpacing(lines(0.6))
        form.addRow("Instructions", self.system)
        form.addRow("Longest answer", self.max_new_tokens)
        form.addRow("Choice of words", self.recommended)
        form.addRow("", self._said)
        form.addRow("Temperature", self.temperature)
        form.addRow("Top-p", self.top_p)
        self._show_own(settings.recommended)

    def settings(self) -> ChatSettings:
        """Return what is chosen."""
        return ChatSettings(
            system=self.system.toPlainText().strip(),
            max_new_tokens=self.max_new_tokens.currentData(),
            recommended=self.recommended.isChecked(),
            temperature=self.temperature.value(),
            top_p=self.top_p.value(),
        )

    def _show_own(self, recommended: bool) -> None:
        self._said.setVisible(recommended)
        for field in (self.temperature, self.top_p):
            self._form.setRowVisible(field, not recommended)


class ChatSettingsDialog(QDialog):
    """The settings of one chat.

    Signals:
        saved: its ChatSettings as they are now.
    """

    saved = Signal(object)

    def __init__(
        self,
        title: str,
        settings: ChatSettings,
        recommended: RecommendedSampling | None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle("Chat settings")
        self.form = ChatSettingsForm(settings, recommended)
        of_what = QLabel(title)
        of_what.setObjectName("title")
        of_what.setWordWrap(True)
        note = QLabel(
            "These settings count from the next question on. What new chats begin with is in Settings, “Answers”."
        )
        note.setObjectName("muted")
        note.setWordWrap(True)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Save | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.save)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(lines(1.2), lines(1.2), lines(1.2), lines(0.8))
        layout.setSpacing(lines(0.8))
        for widget in (of_what, self.form, note, buttons):
            layout.addWidget(widget)
        self.resize(letters(72), 0)

    def event(self, event: QEvent) -> bool:
        """Set a minimum height that fits the width: wrapped texts need more height in a narrow dialog, which Qt
        ignores, so that rows would overlap."""
        handled = super().event(event)
        layout = self.layout()
        if layout is not None and event.type() in (QEvent.Type.LayoutRequest, QEvent.Type.Resize):
            self.setMinimumHeight(layout.totalHeightForWidth(self.width()))
        return handled

    def save(self) -> None:
        """Emit the settings, and close."""
        self.saved.emit(self.form.settings())
        self.accept()


def _lengths(settings: ChatSettings) -> dict[int, str]:
    """Return the lengths to choose from, the one that is set included."""
    return {length: f"{length} tokens" for length in sorted({256, 512, 1024, 2048, 4096, settings.max_new_tokens})}


def _number(says: str, least: float, most: float, step: float) -> QDoubleSpinBox:
    field = QDoubleSpinBox()
    field.setRange(least, most)
    field.setSingleStep(step)
    field.setDecimals(2)
    field.setAccessibleName(says)
    field.setToolTip(says)
    return field


def _in_words(recommended: RecommendedSampling | None) -> str:
    if recommended is None:
        return "This bundle names no recommendation: always the likeliest word."
    return f"Temperature {recommended.temperature:g}, top-p {recommended.top_p:g}: small models repeat themselves less."
