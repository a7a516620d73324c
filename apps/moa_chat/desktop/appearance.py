"""The appearance of the window: colours, fonts, lengths, the style sheet, and the user's choice of theme and zoom."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QFontMetricsF, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication

from moa_runtime.events import LinkStatus, Origin

_STYLE = Path(__file__).with_name("style.qss")
#: Lengths in the style sheet, in lines of text.
_LENGTHS = {
    "handle": 0.2,
    "ring": 0.22,
    "small": 0.28,
    "gap": 0.5,
    "corner": 0.55,
    "scroll": 0.6,
    "box": 0.7,
    "card_corner": 0.7,
    "pill": 0.75,
    "wide": 0.8,
    "bubble_corner": 0.9,
    "line": 1,
    "item": 1.2,
    "grip": 2,
}
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
        drafted, corrected, offline, kept, dropped: text by origin.
        good, warning, bad: the state of the link.
        string, keyword, number, comment, name: highlighted code.
    """

    window: str
    sidebar: str
    surface: str
    bubble: str
    code: str
    found: str  # background of a place that was looked for
    hover: str  # background of what the pointer or the keyboard is on
    border: str
    focus: str  # the ring around what has the keyboard
    text: str
    muted: str
    accent: str
    on_accent: str
    tentative: str  # text that the target has not confirmed
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
        return str(getattr(self, origin.value))

    def of_link(self, status: LinkStatus) -> str:
        colors = {LinkStatus.ONLINE: self.good, LinkStatus.RECONNECTING: self.warning, LinkStatus.OFFLINE: self.bad}
        return colors[status]

    def palette(self) -> QPalette:
        """Return the palette of what the style sheet does not reach, such as a disabled item or a native dialog."""
        palette = QPalette()
        kind = QPalette.ColorRole
        written = (kind.WindowText, kind.Text, kind.ButtonText)
        for color, roles in (
            (self.window, (kind.Window,)),
            (self.sidebar, (kind.AlternateBase,)),
            (self.surface, (kind.Base, kind.Button, kind.ToolTipBase)),
            (self.text, (*written, kind.ToolTipText)),
            (self.muted, (kind.PlaceholderText,)),
            (self.accent, (kind.Highlight, kind.Link, kind.Accent)),
            (self.on_accent, (kind.HighlightedText,)),
        ):
            for role in roles:
                palette.setColor(role, QColor(color))
        for role in written:
            palette.setColor(QPalette.ColorGroup.Disabled, role, QColor(self.muted))
        return palette


_COLOURS = {  # light, dark
    "window": ("#fbfbfa", "#16181c"),
    "sidebar": ("#f1f2f0", "#1c1f24"),
    "surface": ("#ffffff", "#22252b"),
    "bubble": ("#e9edf6", "#2a3040"),
    "code": ("#f2f4f3", "#1e2127"),
    "found": ("#f7e08b", "#5a4a12"),
    "hover": ("#e4e7e8", "#2d313a"),
    "border": ("#d9dcd9", "#363b45"),
    "focus": ("#3554d1", "#93a8ff"),
    "text": ("#1b1e24", "#e7e9ee"),
    "muted": ("#575d69", "#a5abb8"),
    "accent": ("#3554d1", "#93a8ff"),
    "on_accent": ("#ffffff", "#12141a"),
    "tentative": ("#6266a3", "#a3a8e0"),
    "drafted": ("#186a42", "#72d3a0"),
    "corrected": ("#1b57b5", "#85b8ff"),
    "offline": ("#8f4f00", "#f0b45c"),
    "kept": ("#8434ad", "#d8a1f6"),
    "dropped": ("#8f5a60", "#c99a9d"),
    "good": ("#186a42", "#72d3a0"),
    "warning": ("#8a5100", "#f0b45c"),
    "bad": ("#b02a37", "#f59595"),
    "string": ("#186a42", "#8fd6ab"),
    "keyword": ("#8434ad", "#d8a1f6"),
    "number": ("#1b57b5", "#85b8ff"),
    "comment": ("#5d646f", "#9aa1ae"),
    "name": ("#8f4f00", "#f0b45c"),
}
LIGHT, DARK = (Theme(**{name: pair[dark] for name, pair in _COLOURS.items()}) for dark in (0, 1))


def theme_for(name: str) -> Theme:
    """The theme for ``light``, ``dark`` or, as the desktop has it now, ``system``."""
    if name == "system":
        return DARK if QGuiApplication.styleHints().colorScheme() is Qt.ColorScheme.Dark else LIGHT
    return DARK if name == "dark" else LIGHT


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
    line, points = lines(1), QApplication.font().pointSizeF()
    lengths = {name: round(count * line) for name, count in _LENGTHS.items()}
    small, box, ring = lengths["small"], lengths["box"], lengths["ring"]
    return Template(_STYLE.read_text("utf-8")).substitute(
        asdict(theme),
        **lengths,
        thin=small - 1,
        field_corner=small + 2,
        bar=2 * small,
        radio=box // 2 + 1,
        checked=box - 2 * ring + 2,
        figure_points=f"{0.92 * points:.1f}",
        headline_points=f"{1.9 * points:.1f}",
    )


class Appearance(QObject):
    """Applies theme and zoom (of the letters, in percent) to the application, and emits ``changed``; ``origins`` says
    whether answers are coloured by origin."""

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
