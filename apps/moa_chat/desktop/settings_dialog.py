"""The settings of the program, and those of one chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QDoubleSpinBox,
    QFormLayout,
    QPlainTextEdit,
    QScrollArea,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from moa_chat import strings
from moa_chat.desktop.appearance import ZOOMS, letters, lines
from moa_chat.desktop.connection import Connector
from moa_chat.desktop.connection_form import ConnectionForm
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.widgets import CheckBox, add, label, pad
from moa_chat.history.chat_settings import ChatSettings
from moa_runtime.manifest import RecommendedSampling

_TEXT_LINES = 6
_HIGHEST_TEMPERATURE = 2.0
_LENGTHS = (256, 512, 1024, 2048, 4096)


class ComboBox(QComboBox):
    """A list to choose from: each value with its name; ``says`` is the list's own name for screen readers."""

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


class _Dialog(QDialog):
    """A dialog with Save and Cancel; subclasses say what is saved."""

    saved = Signal(object)  # the settings as they are now

    def __init__(self, title: str, parent: QWidget | None) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Save | QDialogButtonBox.StandardButton.Cancel)
        self.buttons.accepted.connect(self.save)
        self.buttons.rejected.connect(self.reject)

    def settings(self) -> ChatSettings:
        """Return what is chosen."""
        raise NotImplementedError

    def save(self) -> None:
        """Emit the settings, and close."""
        self.saved.emit(self.settings())
        self.accept()


class SettingsDialog(_Dialog):
    """The settings of the program, and of new chats; ``recommended`` is by the bundle in use."""

    def __init__(
        self,
        connector: Connector,
        settings: Settings,
        recommended: RecommendedSampling | None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(strings.SETTINGS, parent)
        self.form = ConnectionForm(connector, settings)
        self.theme = ComboBox(strings.THEME, strings.THEMES, settings.theme)
        self.zoom = ComboBox(strings.ZOOM, {zoom: f"{zoom} %" for zoom in ZOOMS}, settings.zoom)
        self.disagreement = ComboBox(strings.WHEN_DISAGREES, strings.DISAGREEMENTS, settings.disagreement)
        self.of_chats = ChatSettingsForm(settings, recommended)
        tabs = QTabWidget()
        tabs.setAccessibleName(strings.SETTINGS_PARTS)
        tabs.addTab(_scrolling(self.form, strings.CONNECTION), strings.CONNECTION)
        tabs.addTab(_scrolling(self._answers(), strings.ANSWERS), strings.ANSWERS)
        tabs.addTab(self._appearance(), strings.APPEARANCE)
        add(QVBoxLayout(self), tabs, self.buttons)
        self.resize(letters(78), lines(30))

    def settings(self) -> Settings:
        return dataclasses.replace(
            self.form.settings(),
            theme=self.theme.currentData(),
            zoom=self.zoom.currentData(),
            disagreement=self.disagreement.currentData(),
            **dataclasses.asdict(self.of_chats.settings()),
        )

    def _answers(self) -> QWidget:
        page = QWidget()
        layout = QVBoxLayout(page)
        pad(layout, 0, spacing=0.8)
        form = QFormLayout()
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        form.setSpacing(lines(0.6))
        form.addRow(strings.WHEN_DISAGREES, self.disagreement)
        form.addRow("", label(strings.WHEN_DISAGREES_WITH, "muted", wraps=False))
        add(layout, label(strings.ABOUT_ANSWERS, "muted"), self.of_chats)
        layout.addLayout(form)
        return page

    def _appearance(self) -> QWidget:
        page = QWidget()
        form = QFormLayout(page)
        pad(form, 1, spacing=0.6)
        form.addRow(strings.THEME, self.theme)
        form.addRow(strings.ZOOM, self.zoom)
        return page


def _scrolling(page: QWidget, says: str) -> QScrollArea:
    area = QScrollArea()
    area.setAccessibleName(says)
    area.setWidgetResizable(True)
    held = QWidget()
    layout = QVBoxLayout(held)
    pad(layout, 1)
    layout.addWidget(page)
    layout.addStretch()
    area.setWidget(held)
    return area


class DecimalField(QDoubleSpinBox):
    """A field for a number with decimals after a point or a comma, whichever the user's language has."""

    def validate(self, text: str, at: int) -> object:
        return super().validate(self._local(text), at)

    def valueFromText(self, text: str) -> float:
        return super().valueFromText(self._local(text))

    def _local(self, text: str) -> str:
        point = self.locale().decimalPoint()
        return text.replace(".", point).replace(",", point)


class ChatSettingsForm(QWidget):
    """The settings of a chat as a form; ``recommended`` is None if the bundle recommends no sampling."""

    def __init__(self, settings: ChatSettings, recommended: RecommendedSampling | None) -> None:
        super().__init__()
        self.system = _text(strings.INSTRUCTIONS_NAME, settings.system, strings.NO_INSTRUCTIONS)
        lengths = {length: strings.TOKENS.format(length) for length in sorted({*_LENGTHS, settings.max_new_tokens})}
        self.max_new_tokens = ComboBox(strings.LONGEST_ANSWER, lengths, settings.max_new_tokens)
        self.recommended = CheckBox(strings.RECOMMENDED)
        self.recommended.setChecked(settings.recommended)
        words = strings.NO_RECOMMENDATION
        if recommended is not None:
            words = strings.RECOMMENDED_VALUES.format(recommended.temperature, recommended.top_p)
        self._said = label(words, "muted")
        self.temperature = _number(strings.TEMPERATURE_NAME, 0.0, _HIGHEST_TEMPERATURE, 0.1)
        self.top_p = _number(strings.TOP_P_NAME, 0.05, 1.0, 0.05)
        self.temperature.setValue(settings.temperature)
        self.top_p.setValue(settings.top_p)
        self.as_json = CheckBox(strings.AS_JSON)
        self.as_json.setChecked(settings.as_json)
        self.schema = _text(strings.SCHEMA_NAME, settings.schema, strings.ANY_OBJECT)
        self.recommended.toggled.connect(self._show_own)
        self.as_json.toggled.connect(self._show_schema)
        form = self._form = QFormLayout(self)
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        pad(form, 0, spacing=0.6)
        form.addRow(strings.INSTRUCTIONS, self.system)
        form.addRow(strings.LONGEST_ANSWER, self.max_new_tokens)
        form.addRow(strings.CHOICE_OF_WORDS, self.recommended)
        form.addRow("", self._said)
        form.addRow(strings.TEMPERATURE, self.temperature)
        form.addRow(strings.TOP_P, self.top_p)
        form.addRow(strings.FORM_OF_ANSWERS, self.as_json)
        form.addRow(strings.SCHEMA, self.schema)
        self._show_own(settings.recommended)
        self._show_schema(settings.as_json)

    def settings(self) -> ChatSettings:
        """Return what is chosen."""
        return ChatSettings(
            system=self.system.toPlainText().strip(),
            max_new_tokens=self.max_new_tokens.currentData(),
            recommended=self.recommended.isChecked(),
            temperature=self.temperature.value(),
            top_p=self.top_p.value(),
            as_json=self.as_json.isChecked(),
            schema=self.schema.toPlainText(),
        )

    def _show_own(self, recommended: bool) -> None:
        self._said.setVisible(recommended)
        for field in (self.temperature, self.top_p):
            self._form.setRowVisible(field, not recommended)

    def _show_schema(self, as_json: bool) -> None:
        self._form.setRowVisible(self.schema, as_json)


class ChatSettingsDialog(_Dialog):
    """The settings of one chat."""

    def __init__(
        self, title: str, settings: ChatSettings, recommended: RecommendedSampling | None, parent: QWidget | None = None
    ) -> None:
        super().__init__(strings.CHAT_SETTINGS, parent)
        self.form = ChatSettingsForm(settings, recommended)
        layout = QVBoxLayout(self)
        pad(layout, 1.2, 1.2, 1.2, 0.8, spacing=0.8)
        add(layout, label(title, "title"), self.form, label(strings.ABOUT_CHAT_SETTINGS, "muted"), self.buttons)
        self.resize(letters(72), 0)

    def settings(self) -> ChatSettings:
        return self.form.settings()

    def event(self, event: QEvent) -> bool:
        """Set a minimum height that fits the width: wrapped texts need more height in a narrow dialog, which Qt
        ignores, so that rows would overlap."""
        handled = super().event(event)
        layout = self.layout()
        if layout is not None and event.type() in (QEvent.Type.LayoutRequest, QEvent.Type.Resize):
            self.setMinimumHeight(layout.totalHeightForWidth(self.width()))
        return handled


def _text(says: str, text: str, empty: str) -> QPlainTextEdit:
    field = QPlainTextEdit(text)
    field.setObjectName("field")
    field.setPlaceholderText(empty)
    field.setTabChangesFocus(True)
    field.setFixedHeight(lines(_TEXT_LINES))
    field.setAccessibleName(says)
    return field


def _number(says: str, least: float, most: float, step: float) -> QDoubleSpinBox:
    field = DecimalField()
    field.setRange(least, most)
    field.setSingleStep(step)
    field.setDecimals(2)
    field.setAccessibleName(says)
    field.setToolTip(says)
    return field
