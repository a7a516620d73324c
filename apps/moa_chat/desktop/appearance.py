"""The appearance of the window: colours, fonts, lengths, the style sheet, and the user's choice of theme and zoom."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QFontMetricsF, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication

from moa_runtime.events import LinkStatus, Origin

_POINTS = 10.5
SIDEBAR_LETTERS = 30
COLUMN_LETTERS = 82
ZOOMS = (100, 110, 125, 150, 175, 200)


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
        """Return the palette of what the style sheet does not reach, such as a disabled item or a native dialog."""
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
    """Return the contrast ratio of two colours as WCAG 2.2 defines it: from 1 (the same) to 21 (black on white)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    """Return the relative luminance of ``#rrggbb``, from 0 to 1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_font(zoom: int) -> QFont:
    """The platform's font; ``zoom`` in percent."""
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.GeneralFont)
    font.setPointSizeF(_POINTS * zoom / 100)
    return font


def code_font(zoom: int) -> QFont:
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
    font.setPointSizeF(0.94 * _POINTS * zoom / 100)
    return font


def letters(count: float) -> int:
    """Return the width of ``count`` letters n in the application's font, in device-independent pixels."""
    return round(QFontMetricsF(QApplication.font()).horizontalAdvance("n") * count)


def lines(count: float) -> int:
    """Return the height of ``count`` lines, in device-independent pixels."""
    return round(QFontMetricsF(QApplication.font()).height() * count)


def document_style(theme: Theme, zoom: int) -> str:
    """Return the style sheet of rendered Markdown."""
    size = _POINTS * zoom / 100
    mono = code_font(zoom).family()
    return f"""
        p, ul, ol, blockquote, table {{ margin-top: 0; margin-bottom: 0; }}
        p, li {{ line-height: 140%; }}
        li {{ margin-bottom: {0.15 * size:.1f}px; }}
        h1 {{ font-size: {1.5 * size:.1f}pt; margin: 0; }}
        h2 {{ font-size: {1.3 * size:.1f}pt; margin: 0; }}
        h3, h4, h5, h6 {{ font-size: {1.12 * size:.1f}pt; margin: 0; }}
        a {{ color: {theme.accent}; }}
        code {{ font-family: '{mono}'; font-size: {0.94 * size:.1f}pt; background-color: {theme.code}; }}
        th {{ background-color: {theme.code}; font-weight: 600; }}
        th, td {{ padding: {0.4 * size:.0f}px {0.8 * size:.0f}px; border: 1px solid {theme.border}; }}
        table {{ border-collapse: collapse; }}
        blockquote {{ color: {theme.muted}; margin-left: {1.2 * size:.0f}px; }}
    """


def style_sheet(theme: Theme) -> str:
    """Return the style sheet of all widgets; lengths follow the application's font."""
    line = lines(1)
    box, ring = round(0.7 * line), round(0.22 * line)
    gap, small, round_corner = round(0.5 * line), round(0.28 * line), round(0.55 * line)
    return f"""
        * {{ color: {theme.text}; }}
        QWidget#window, QWidget#main, QDialog, QScrollArea#conversation, QWidget#column, QMessageBox {{
            background: {theme.window};
        }}
        QWidget#sidebar {{ background: {theme.sidebar}; border-right: 1px solid {theme.border}; }}
        QWidget#header {{ background: {theme.window}; border-bottom: 1px solid {theme.border}; }}
        QScrollArea {{ border: 0; background: transparent; }}
        QTextBrowser {{ background: transparent; border: 0; padding: 0; }}
        QToolTip {{
            background: {theme.surface}; color: {theme.text}; border: 1px solid {theme.border}; padding: {small}px;
        }}
        QLabel#muted, QLabel#figures {{ color: {theme.muted}; }}
        QLabel#figures {{ font-size: {0.92 * _points():.1f}pt; }}
        QLabel#title {{ font-weight: 600; }}
        QLabel#headline {{ font-size: {1.9 * _points():.1f}pt; font-weight: 600; }}
        QLabel#problem {{ color: {theme.bad}; }}
        QLabel#good {{ color: {theme.good}; }}

        QPushButton {{
            background: {theme.surface}; border: 1px solid {theme.border}; border-radius: {round_corner}px;
            padding: {small}px {round(0.8 * line)}px;
        }}
        QPushButton:hover {{ background: {theme.hover}; }}
        QPushButton:focus, QToolButton:focus, QLineEdit:focus, QComboBox:focus, QDoubleSpinBox:focus,
        QPlainTextEdit#field:focus {{
            border: 1px solid {theme.focus};
        }}
        QPushButton:disabled {{ color: {theme.muted}; }}
        QPushButton#primary {{
            background: {theme.accent}; color: {theme.on_accent}; border: 1px solid {theme.accent}; font-weight: 600;
        }}
        QPushButton#primary:focus {{ border: 2px solid {theme.text}; }}
        QPushButton#primary:disabled {{ background: {theme.hover}; color: {theme.muted}; border-color: {theme.hover}; }}
        QToolButton {{
            background: transparent; border: 1px solid transparent; border-radius: {small + 2}px; padding: {small}px;
        }}
        QToolButton:hover {{ background: {theme.hover}; }}
        QToolButton:checked {{ background: {theme.hover}; border: 1px solid {theme.border}; }}
        QToolButton::menu-indicator {{ image: none; }}
        QToolButton#send {{ background: {theme.accent}; border-radius: {round(0.75 * line)}px; padding: {small}px; }}
        QToolButton#send:disabled {{ background: {theme.hover}; }}
        QToolButton#send:focus {{ border: 2px solid {theme.text}; }}
        QLabel#pill {{
            border: 1px solid {theme.border}; border-radius: {round(0.75 * line)}px; background: {theme.surface};
            padding: {small - 1}px {gap}px;
        }}
        QToolButton#jump {{
            background: {theme.surface}; border: 1px solid {theme.border}; border-radius: {round(0.9 * line)}px;
        }}

        QLineEdit, QComboBox, QDoubleSpinBox, QPlainTextEdit#field {{
            background: {theme.surface}; border: 1px solid {theme.border}; border-radius: {small + 2}px;
            padding: {small}px {gap}px; selection-background-color: {theme.accent};
            selection-color: {theme.on_accent};
        }}
        QDoubleSpinBox QLineEdit {{ border: 0; padding: 0; background: transparent; }}
        /* Without buttons, Qt would leave the number no room: these have no width, and are beside it. */
        QDoubleSpinBox::up-button, QDoubleSpinBox::down-button {{ subcontrol-origin: content; width: 0; border: 0; }}
        QDoubleSpinBox::up-button {{ subcontrol-position: right; }}
        QDoubleSpinBox::down-button {{ subcontrol-position: left; }}
        QComboBox::drop-down {{ border: 0; width: {line}px; }}
        QLineEdit, QPlainTextEdit {{ placeholder-text-color: {theme.muted}; }}
        QLineEdit:disabled {{ color: {theme.muted}; background: {theme.sidebar}; }}
        QComboBox QAbstractItemView, QMenu {{
            background: {theme.surface}; border: 1px solid {theme.border}; padding: {small}px;
        }}
        QMenu::item {{ padding: {small}px {round(1.2 * line)}px; border-radius: {small}px; }}
        QMenu::item:selected, QComboBox QAbstractItemView::item:selected {{
            background: {theme.hover}; color: {theme.text};
        }}
        QListWidget {{ background: transparent; border: 0; outline: 0; }}
        QListWidget::item {{ padding: {gap}px {gap}px; border-radius: {small + 2}px; margin: 1px 0; }}
        QListWidget::item:hover {{ background: {theme.hover}; color: {theme.text}; }}
        QListWidget::item:selected {{ background: {theme.hover}; color: {theme.text}; }}
        QListWidget::item:focus {{ border: 1px solid {theme.focus}; }}

        QFrame#composer {{
            background: {theme.surface}; border: 1px solid {theme.border}; border-radius: {round(0.9 * line)}px;
        }}
        QFrame#composer[active="true"] {{ border: 1px solid {theme.focus}; }}
        QPlainTextEdit {{
            background: transparent; border: 0; selection-background-color: {theme.accent};
            selection-color: {theme.on_accent};
        }}
        QFrame#bubble {{ background: {theme.bubble}; border-radius: {round(0.9 * line)}px; }}
        QFrame#code {{ background: {theme.code}; border: 1px solid {theme.border}; border-radius: {round_corner}px; }}
        QFrame#banner {{
            background: {theme.surface}; border: 1px solid {theme.border}; border-radius: {round(0.7 * line)}px;
        }}
        QFrame#card {{
            background: {theme.surface}; border: 1px solid {theme.border}; border-radius: {round(0.7 * line)}px;
        }}
        QFrame#inner {{
            background: {theme.window}; border: 1px solid {theme.warning}; border-radius: {round_corner}px;
        }}
        QFrame#panel {{ background: {theme.window}; border-top: 1px solid {theme.border}; }}
        QCheckBox, QRadioButton {{ spacing: {gap}px; }}
        QCheckBox::indicator, QRadioButton::indicator {{
            width: {box}px; height: {box}px; background: {theme.surface}; border: 1px solid {theme.muted};
        }}
        QCheckBox::indicator {{ border-radius: {small - 1}px; }}
        QRadioButton::indicator {{ border-radius: {box // 2 + 1}px; }}
        QCheckBox::indicator:checked, QRadioButton::indicator:checked {{
            width: {box - 2 * ring + 2}px; height: {box - 2 * ring + 2}px; border: {ring}px solid {theme.accent};
        }}
        QDialogButtonBox {{ dialogbuttonbox-buttons-have-icons: 0; }}
        QTabWidget::pane {{ border: 0; border-top: 1px solid {theme.border}; }}
        QTabBar::tab {{
            background: transparent; color: {theme.muted}; border: 0; border-bottom: 2px solid transparent;
            padding: {gap}px {line}px;
        }}
        QTabBar::tab:selected {{ color: {theme.text}; border-bottom: 2px solid {theme.accent}; }}
        QTabBar::tab:focus {{ background: {theme.hover}; }}
        QCheckBox:focus, QRadioButton:focus {{ color: {theme.accent}; }}
        QProgressBar {{ background: {theme.hover}; border: 0; border-radius: {small}px; height: {small * 2}px; }}
        QProgressBar::chunk {{ background: {theme.accent}; border-radius: {small}px; }}
        QScrollBar:vertical {{ background: transparent; width: {round(0.6 * line)}px; margin: 0; }}
        QScrollBar:horizontal {{ background: transparent; height: {round(0.6 * line)}px; margin: 0; }}
        QScrollBar::handle {{ background: {theme.border}; border-radius: {round(0.2 * line)}px; margin: 2px; }}
        QScrollBar::handle:vertical {{ min-height: {2 * line}px; }}
        QScrollBar::handle:horizontal {{ min-width: {2 * line}px; }}
        QScrollBar::handle:hover {{ background: {theme.muted}; }}
        QScrollBar::add-line, QScrollBar::sub-line {{ width: 0; height: 0; }}
        QScrollBar::add-page, QScrollBar::sub-page {{ background: transparent; }}
    """


def _points() -> float:
    return QApplication.font().pointSizeF()


class Appearance(QObject):
    """Applies theme and zoom to the application, and emits ``changed``.

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
        """Use a theme; ``system`` follows the desktop."""
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
