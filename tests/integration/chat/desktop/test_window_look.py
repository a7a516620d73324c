"""How the window looks and feels: for eyes, keyboards and screen readers."""

from __future__ import annotations

import dataclasses
from html import escape

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QFontMetricsF, QGuiApplication, QKeySequence
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractScrollArea,
    QApplication,
    QComboBox,
    QLabel,
    QLineEdit,
    QTabBar,
    QWidget,
)

from moa_chat.desktop.appearance import DARK, LIGHT
from moa_chat.desktop.message_widgets import Answer, CodeBlock, TextBlock
from moa_chat.desktop.settings_dialog import SettingsDialog
from moa_chat.history.message import Dropped, Message
from moa_runtime.events import Origin, TextSpan
from support.chat.desktop.window_driving import WAIT

CONTENT = "Some **bold** text.\n\n```python\nx = '🎨'  # paint\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
ANSWER = Message(
    "assistant",
    CONTENT,
    (
        TextSpan(CONTENT[:9], Origin.DRAFTED, True),
        TextSpan(CONTENT[9:40], Origin.CORRECTED, True),
        TextSpan(CONTENT[40:], Origin.OFFLINE, False),
    ),
    (Dropped(7, "another"), Dropped(14, "\n "), Dropped(33, "y")),
)


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours as WCAG 2.2 defines it, from 1 to 21."""
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_can_be_read(theme):
    """WCAG 2.2, level AA: 4.5 for text, 3 for what shows where the keyboard is."""
    colors = dataclasses.asdict(theme)
    backgrounds = [colors[name] for name in ("window", "sidebar", "surface", "bubble", "code", "hover")]
    for name in ("text", "muted", "accent", "good", "warning", "bad"):
        assert min(contrast(colors[name], background) for background in backgrounds) >= 4.5, name
    for name in ("tentative", "drafted", "corrected", "offline", "kept", "dropped"):
        assert min(contrast(colors[name], colors[background]) for background in ("window", "code")) >= 4.5, name
    for name in ("string", "keyword", "number", "comment", "name"):
        assert contrast(colors[name], theme.code) >= 4.5, name
    assert contrast(theme.text, theme.found) >= 4.5
    assert contrast(theme.on_accent, theme.accent) >= 4.5
    assert min(contrast(theme.focus, background) for background in backgrounds) >= 3


def test_contrast_of_known_pairs():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def controls(window: QWidget) -> list[QWidget]:
    """What can be clicked, written into or scrolled, without the insides that Qt makes."""
    kinds = (QAbstractButton, QAbstractScrollArea, QComboBox, QLineEdit)
    return [
        widget
        for widget in window.findChildren(QWidget)
        if isinstance(widget, kinds) and not widget.objectName().startswith("qt_") and not _is_inside(widget)
    ]


def _is_inside(widget: QWidget) -> bool:
    """Part of a control that has the name itself."""
    parent = widget.parentWidget()
    while parent is not None and not isinstance(parent, (QComboBox, QLineEdit, QTabBar)):
        parent = parent.parentWidget()
    return parent is not None


def test_screen_readers_get_a_name_for_everything(open_window):
    window = open_window()
    window.page.conversation.show_messages([Message("user", "Question"), ANSWER])
    dialog = SettingsDialog(window.connector, window.settings, None, window)
    found = controls(window) + controls(dialog)
    assert len(found) > 40
    for widget in found:
        named = widget.accessibleName() or (isinstance(widget, QAbstractButton) and widget.text())
        assert named, f"{type(widget).__name__} in {type(widget.parentWidget()).__name__}"


def test_every_command_has_keys_of_its_own(open_window):
    window = open_window()
    keys = [QKeySequence(command.keys).toString() for command in window.commands]
    assert all(keys) and len(set(keys)) == len(keys)


@pytest.mark.parametrize("zoom", [100, 200])
def test_no_label_is_cut_off_at_twice_the_size(open_window, appearance, qtbot, zoom):
    window = open_window(server="ws://127.0.0.1:9")
    appearance.set_zoom(zoom)
    try:
        window.resize(1600, 1000)
        window.page.conversation.show_messages([Message("user", "Question"), ANSWER])
        QApplication.processEvents()
        for button in window.findChildren(QAbstractButton):
            if button.isVisible():
                assert button.width() >= button.minimumSizeHint().width(), button.accessibleName()
                assert button.height() >= button.minimumSizeHint().height(), button.accessibleName()
        for label in window.findChildren(QLabel):
            if label.isVisible() and label.text() and label is not window.page.title:
                assert label.height() >= QFontMetricsF(label.font()).height() - 1, label.text()
        assert window.minimumSizeHint().width() <= 1600
    finally:
        appearance.set_zoom(100)


def test_a_title_without_room_ends_in_an_ellipsis(open_window):
    """Eyes find the rest in the tooltip, screen readers in the name."""
    window = open_window(server="ws://127.0.0.1:9")
    title = window.page.title
    whole = "Why is <b>the sky</b> blue in the morning, and red at night?"
    title.setText(whole)
    window.resize(1600, 800)
    QApplication.processEvents()
    assert title.shown == whole
    wide = title.grab().toImage()
    window.resize(window.minimumSizeHint().width(), 800)
    QApplication.processEvents()
    cut = title.shown
    assert cut.endswith("…") and whole.startswith(cut[:-1]) and title.text() == whole
    assert whole in title.accessibleName() and title.toolTip() == f"<p>{escape(whole)}</p>"
    # What is drawn is what is said: the same as of a label with the shorter text.
    drawn = title.grab().toImage()
    title.setText(cut)
    assert title.grab().toImage() == drawn != wide


def test_origins_are_coloured_on_demand(open_window, appearance):
    window = open_window(server="ws://127.0.0.1:9")
    window.page.conversation.show_messages([ANSWER])
    answer = window.page.conversation.findChildren(Answer)[0]

    def color_at(text: str) -> str:
        for block in [*answer.findChildren(TextBlock), *answer.findChildren(CodeBlock)]:
            document = (block if isinstance(block, TextBlock) else block.text).document()
            found = document.find(text)
            if not found.isNull() and block.parent() is not None and not block.isHidden():
                return found.charFormat().foreground().color().name()
        raise AssertionError(f"{text} is not shown")

    assert color_at("paint") == LIGHT.offline, "what is not confirmed has a colour of its own anyhow"
    assert color_at("bold") == "#000000", "the colour of the page"
    window.page.origins.click()
    assert color_at("Some") == LIGHT.drafted
    assert color_at("bold") == LIGHT.corrected, "a word in two colours is shown in one"
    assert color_at("text") == LIGHT.corrected
    assert color_at("another") == LIGHT.dropped
    assert "\N{THIN SPACE}text" not in answer.texts[0].toPlainText(), "what was taken back and is blank is not shown"
    code = answer.findChildren(CodeBlock)[0]
    code.copy_button.copy()
    assert QGuiApplication.clipboard().text() == "x = '🎨'  # paint", "what was taken back is not copied"
    appearance.set_theme("dark")
    assert color_at("another") == DARK.dropped
    appearance.set_theme("light")
    window.page.origins.click()
    with pytest.raises(AssertionError, match="not shown"):
        color_at("another")


def test_the_page_stays_where_the_user_reads(open_window, qtbot):
    window = open_window(server="ws://127.0.0.1:9")
    page, bar = window.page.conversation, window.page.conversation.verticalScrollBar()
    long = "\n\n".join(f"Paragraph {number}." for number in range(80))
    page.show_messages([Message("user", "Question"), Message("assistant", long)])
    qtbot.waitUntil(lambda: bar.value() == bar.maximum() > 0, timeout=WAIT)
    page.set_message(1, Message("assistant", long + "\n\nMore."))
    qtbot.waitUntil(lambda: bar.value() == bar.maximum(), timeout=WAIT)
    bar.setValue(bar.maximum() // 2)
    before = bar.value()
    largest = bar.maximum()
    page.set_message(1, Message("assistant", long + "\n\nMore.\n\nAnd more.\n\nAnd still more."))
    qtbot.waitUntil(lambda: bar.maximum() > largest, timeout=WAIT)
    assert bar.value() == before and page.jump_button.isVisible()
    qtbot.mouseClick(page.jump_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: bar.value() == bar.maximum() and not page.jump_button.isVisible(), timeout=WAIT)


def test_only_the_changed_blocks_are_rendered_again(open_window, monkeypatch):
    window = open_window(server="ws://127.0.0.1:9")
    paragraphs = "\n\n".join(f"Paragraph {number}." for number in range(30))
    window.page.conversation.show_messages([Message("assistant", paragraphs)])
    rendered = []
    show = TextBlock.show_block
    monkeypatch.setattr(TextBlock, "show_block", lambda self, *rest: (rendered.append(self), show(self, *rest)))
    window.page.conversation.set_message(0, Message("assistant", paragraphs + " And more"))
    assert 1 <= len(rendered) <= 2


def test_a_long_chat_opens_with_its_end(open_window):
    window = open_window(server="ws://127.0.0.1:9")
    messages = [Message("assistant", f"Answer {number}") for number in range(100)]
    page = window.page.conversation
    page.show_messages(messages)
    assert len(page.widgets) < 100 and page.widgets[-1].message == messages[-1]
    while page.earlier.isVisibleTo(page):
        page.earlier.click()
    assert [widget.message for widget in page.widgets] == messages


def test_an_empty_chat_offers_no_earlier_messages(open_window):
    assert not open_window().page.conversation.earlier.isVisible()


def test_plot_and_status_say_their_figures(open_window):
    from moa_chat.desktop.stats_panel import Round

    window = open_window(server="ws://127.0.0.1:9")
    window.page.plot_button.click()
    assert window.page.plot.isVisible()
    window.page.plot.add(Round(0.25, 3.0))
    assert not window.page.plot.grab().isNull()
    assert "250 ms" in window.page.plot.round_trips.accessibleDescription()
    window.page.plot.add(Round(2.4567, 1.0))
    assert "now 2457 ms" in window.page.plot.round_trips.accessibleDescription()
