"""How the window looks: one style sheet made from a theme and the size of the letters."""

from __future__ import annotations

from PySide6.QtGui import QFont, QFontDatabase, QFontMetricsF
from PySide6.QtWidgets import QApplication

from moa_chat.desktop.theme import Theme

_POINTS = 10.5
SIDEBAR_LETTERS = 30
COLUMN_LETTERS = 82


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
    """The width of so many letters n in the application's font, in device-independent pixels."""
    return round(QFontMetricsF(QApplication.font()).horizontalAdvance("n") * count)


def lines(count: float) -> int:
    """The height of so many lines, in device-independent pixels."""
    return round(QFontMetricsF(QApplication.font()).height() * count)


def document_style(theme: Theme, zoom: int) -> str:
    """Style sheet inside rendered Markdown."""
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
    """Style sheet of all widgets; lengths follow the application's font."""
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
