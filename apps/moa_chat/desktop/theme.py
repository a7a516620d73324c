"""The window's colours, light and dark."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QGuiApplication, QPalette

from moa_runtime.events import LinkStatus, Origin


@dataclass(frozen=True)
class Theme:
    """Colours as ``#rrggbb``. Text on each of the backgrounds reaches a contrast of 4.5 (WCAG 2.2, level AA).

    Attributes:
        window, sidebar, surface, bubble, code: backgrounds; ``surface`` is that of fields, ``bubble`` that of the
            user's messages.
        found: background of a place that was looked for.
        hover: background of what the pointer or the keyboard is on.
        focus: the ring around what has the keyboard.
        tentative: text that the target has not confirmed.
        drafted, corrected, offline, kept, dropped: text by origin.
        good, warning, bad: the state of the link.
        string, keyword, number, comment, name: highlighted code.
    """

    window: str
    sidebar: str
    surface: str
    bubble: str
    code: str
    found: str
    hover: str
    border: str
    focus: str
    text: str
    muted: str
    accent: str
    on_accent: str
    tentative: str
    drafted: str
    corrected: str
    offline: str
    kept: str
    dropped: str
    good: str
    warning: str
    bad: str
    string: str
    keyword: str
    number: str
    comment: str
    name: str

    def of_origin(self, origin: Origin) -> str:
        return {
            Origin.DRAFTED: self.drafted,
            Origin.CORRECTED: self.corrected,
            Origin.OFFLINE: self.offline,
            Origin.KEPT: self.kept,
        }[origin]

    def of_link(self, status: LinkStatus) -> str:
        return {
            LinkStatus.ONLINE: self.good,
            LinkStatus.RECONNECTING: self.warning,
            LinkStatus.OFFLINE: self.bad,
        }[status]

    def palette(self) -> QPalette:
        """For what the style sheet does not reach, such as a disabled item or a native dialog."""
        palette = QPalette()
        roles = {
            QPalette.ColorRole.Window: self.window,
            QPalette.ColorRole.WindowText: self.text,
            QPalette.ColorRole.Base: self.surface,
            QPalette.ColorRole.AlternateBase: self.sidebar,
            QPalette.ColorRole.Text: self.text,
            QPalette.ColorRole.PlaceholderText: self.muted,
            QPalette.ColorRole.Button: self.surface,
            QPalette.ColorRole.ButtonText: self.text,
            QPalette.ColorRole.ToolTipBase: self.surface,
            QPalette.ColorRole.ToolTipText: self.text,
            QPalette.ColorRole.Highlight: self.accent,
            QPalette.ColorRole.HighlightedText: self.on_accent,
            QPalette.ColorRole.Link: self.accent,
            QPalette.ColorRole.Accent: self.accent,
        }
        for role, color in roles.items():
            palette.setColor(role, QColor(color))
        for role in (QPalette.ColorRole.Text, QPalette.ColorRole.ButtonText, QPalette.ColorRole.WindowText):
            palette.setColor(QPalette.ColorGroup.Disabled, role, QColor(self.muted))
        return palette


LIGHT = Theme(
    window="#fbfbfa",
    sidebar="#f1f2f0",
    surface="#ffffff",
    bubble="#e9edf6",
    code="#f2f4f3",
    found="#f7e08b",
    hover="#e4e7e8",
    border="#d9dcd9",
    focus="#3554d1",
    text="#1b1e24",
    muted="#575d69",
    accent="#3554d1",
    on_accent="#ffffff",
    tentative="#6266a3",
    drafted="#186a42",
    corrected="#1b57b5",
    offline="#8f4f00",
    kept="#8434ad",
    dropped="#8f5a60",
    good="#186a42",
    warning="#8a5100",
    bad="#b02a37",
    string="#186a42",
    keyword="#8434ad",
    number="#1b57b5",
    comment="#5d646f",
    name="#8f4f00",
)

DARK = Theme(
    window="#16181c",
    sidebar="#1c1f24",
    surface="#22252b",
    bubble="#2a3040",
    code="#1e2127",
    found="#5a4a12",
    hover="#2d313a",
    border="#363b45",
    focus="#93a8ff",
    text="#e7e9ee",
    muted="#a5abb8",
    accent="#93a8ff",
    on_accent="#12141a",
    tentative="#a3a8e0",
    drafted="#72d3a0",
    corrected="#85b8ff",
    offline="#f0b45c",
    kept="#d8a1f6",
    dropped="#c99a9d",
    good="#72d3a0",
    warning="#f0b45c",
    bad="#f59595",
    string="#8fd6ab",
    keyword="#d8a1f6",
    number="#85b8ff",
    comment="#9aa1ae",
    name="#f0b45c",
)


def theme_for(name: str) -> Theme:
    """The theme for ``light``, ``dark`` or, as the desktop has it now, ``system``."""
    if name == "system":
        return DARK if QGuiApplication.styleHints().colorScheme() is Qt.ColorScheme.Dark else LIGHT
    return DARK if name == "dark" else LIGHT


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours as WCAG 2.2 defines it: from 1 (the same) to 21 (black on white)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb``, from 0 to 1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
