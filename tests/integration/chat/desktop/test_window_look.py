"""The look and feel of the window: for eyes, keyboards and screen readers."""

from __future__ import annotations

import dataclasses

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFontMetricsF, QGuiApplication, QKeySequence
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractScrollArea,
    QApplication,
    QCheckBox,
    QComboBox,
    QLabel,
    QLineEdit,
    QTabBar,
    QWidget,
)

from moa_chat import strings
from moa_chat.desktop.appearance import DARK, LIGHT, letters
from moa_chat.desktop.message_widgets import CodeBlock, TextBlock
from moa_chat.desktop.notices import Legend
from moa_chat.desktop.settings_dialog import SettingsDialog
from moa_chat.desktop.stats_panel import Round
from moa_chat.desktop.widgets import CheckBox, plain_tip
from moa_chat.history.message import Dropped, Message
from moa_runtime.events import LinkChanged, LinkStatus, Origin, TextSpan
from support.chat.desktop.window_driving import answers_of
from support.contrast import contrast

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


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_has_enough_contrast(theme):
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


def test_texts_of_a_verifier_or_a_model_are_no_html(away):
    """A picture named in a fault, a title or a code fence would be loaded and drawn, from the disk too."""
    picture = "<img src='file:///etc/hostname'>"
    away.page.pill.set_link(LinkChanged(LinkStatus.RECONNECTING, picture))
    away.page.notice.say(picture)
    away.page.title.setText(picture)
    for label in away.findChildren(QLabel):
        ours = isinstance(label, Legend) or label.text() in vars(strings).values()
        assert ours or not label.text() or label.textFormat() == Qt.TextFormat.PlainText, label.text()
        assert picture not in label.toolTip()
    assert picture in away.page.notice.text


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


def test_screen_readers_get_a_name_for_every_control_and_every_command_has_keys(open_window):
    window = open_window()
    window.page.conversation.show_messages([Message("user", "Question"), ANSWER])
    assert not window.page.conversation.earlier.isVisible()
    found = controls(window) + controls(SettingsDialog(window.connector, window.settings, None, window))
    assert len(found) > 40
    for widget in found:
        named = widget.accessibleName() or (isinstance(widget, QAbstractButton) and widget.text())
        assert named, f"{type(widget).__name__} in {type(widget.parentWidget()).__name__}"
    keys = [QKeySequence(command.keys).toString() for command in window.commands]
    assert all(keys) and len(set(keys)) == len(keys)


@pytest.mark.parametrize("zoom", [100, 200])
def test_no_label_is_cut_off_at_twice_the_size(away, appearance, zoom):
    appearance.set_zoom(zoom)
    try:
        away.resize(1600, 1000)
        away.page.conversation.show_messages([Message("user", "Question"), ANSWER])
        QApplication.processEvents()
        for button in away.findChildren(QAbstractButton):
            if button.isVisible():
                least = button.minimumSizeHint()
                assert button.width() >= least.width() and button.height() >= least.height(), button.accessibleName()
        for label in away.findChildren(QLabel):
            if label.isVisible() and label.text() and label is not away.page.title:
                assert label.height() >= QFontMetricsF(label.font()).height() - 1, label.text()
        assert away.minimumSizeHint().width() <= 1600
    finally:
        appearance.set_zoom(100)


def test_a_longer_state_of_the_link_takes_no_room_from_the_title(away):
    """The words of the buttons give way."""
    page = away.page
    page.title.setText("Why is the sky blue in the morning?")
    page.pill.set_link(LinkChanged(LinkStatus.ONLINE))

    def have_words(width: int) -> bool:
        away.resize(width, 800)
        QApplication.processEvents()
        return page.offline.toolButtonStyle() is Qt.ToolButtonStyle.ToolButtonTextBesideIcon

    least = next(width for width in range(500, 2500, 5) if have_words(width))
    assert have_words(least)
    page.pill.set_link(LinkChanged(LinkStatus.OFFLINE, retry_in_s=12.0))
    QApplication.processEvents()
    assert away.width() == least and page.pill.text().endswith("reconnecting in 12 s")
    assert page.offline.toolButtonStyle() is Qt.ToolButtonStyle.ToolButtonIconOnly
    assert page.title.width() >= letters(14)


def test_a_ticked_box_is_filled_and_has_a_tick(qtbot, appearance):
    ours, plain = CheckBox("Always"), QCheckBox("Always")
    drawn = {}
    for box in (ours, plain):
        qtbot.addWidget(box)
        for ticked in (False, True):
            box.setChecked(ticked)
            drawn[box, ticked] = box.grab().toImage()
    assert drawn[ours, False] == drawn[plain, False] and drawn[ours, True] != drawn[plain, True]
    filled = drawn[plain, True]
    accent = QColor(appearance.theme.accent)
    assert sum(filled.pixelColor(x, filled.height() // 2) == accent for x in range(filled.height())) > 5


def test_a_title_without_room_ends_in_an_ellipsis(away):
    """Eyes find the rest in the tooltip, screen readers in the name."""
    title = away.page.title
    whole = "Why is <b>the sky</b> blue in the morning, and red at night?"
    title.setText(whole)
    away.resize(1600, 800)
    QApplication.processEvents()
    assert title.shown == whole
    wide = title.grab().toImage()
    away.resize(away.minimumSizeHint().width(), 800)
    QApplication.processEvents()
    cut = title.shown
    assert cut.endswith("…") and whole.startswith(cut[:-1]) and title.text() == whole
    assert title.accessibleName() == strings.TITLE.format(whole) and title.toolTip() == plain_tip(whole)
    # The drawing is that of a label with the shorter text.
    drawn = title.grab().toImage()
    title.setText(cut)
    assert title.grab().toImage() == drawn != wide


def test_origins_are_coloured_on_demand(away, appearance):
    away.page.conversation.show_messages([ANSWER])
    answer = answers_of(away)[0]

    def color_at(text: str) -> str | None:
        """The colour of a text; None if it is not shown."""
        for block in [*answer.findChildren(TextBlock), *answer.findChildren(CodeBlock)]:
            document = (block if isinstance(block, TextBlock) else block.text).document()
            found = document.find(text)
            if not found.isNull() and block.parent() is not None and not block.isHidden():
                return found.charFormat().foreground().color().name()
        return None

    assert color_at("paint") == LIGHT.offline, "unconfirmed text has a colour of its own anyhow"
    assert color_at("bold") == "#000000", "the colour of the page"
    away.page.origins.click()
    assert color_at("Some") == LIGHT.drafted
    assert color_at("bold") == LIGHT.corrected, "a word in two colours is shown in one"
    assert color_at("text") == LIGHT.corrected
    assert color_at("another") == LIGHT.dropped
    assert "\N{THIN SPACE}text" not in answer.texts[0].toPlainText(), "dropped blanks are not shown"
    answer.findChildren(CodeBlock)[0].copy_button.copy()
    assert QGuiApplication.clipboard().text() == "x = '🎨'  # paint", "dropped text is not copied"
    appearance.set_theme("dark")
    assert color_at("another") == DARK.dropped
    appearance.set_theme("light")
    away.page.origins.click()
    assert color_at("another") is None


def test_the_page_stays_where_the_user_reads(away, qtbot, until):
    page, bar = away.page.conversation, away.page.conversation.verticalScrollBar()
    long = "\n\n".join(f"Paragraph {number}." for number in range(80))
    page.show_messages([Message("user", "Question"), Message("assistant", long)])
    until(lambda: bar.value() == bar.maximum() > 0)
    page.set_message(1, Message("assistant", long + "\n\nMore."))
    until(lambda: bar.value() == bar.maximum())
    bar.setValue(bar.maximum() // 2)
    before, largest = bar.value(), bar.maximum()
    page.set_message(1, Message("assistant", long + "\n\nMore.\n\nAnd more.\n\nAnd still more."))
    until(lambda: bar.maximum() > largest)
    assert bar.value() == before and page.jump_button.isVisible()
    qtbot.mouseClick(page.jump_button, Qt.MouseButton.LeftButton)
    until(lambda: bar.value() == bar.maximum() and not page.jump_button.isVisible())


def test_only_the_changed_blocks_of_the_end_of_a_long_chat_are_rendered(away, monkeypatch):
    page = away.page.conversation
    paragraphs = "\n\n".join(f"Paragraph {number}." for number in range(30))
    messages = [*(Message("assistant", f"Answer {number}") for number in range(99)), Message("assistant", paragraphs)]
    page.show_messages(messages)
    assert len(page.widgets) < 100 and page.widgets[-1].message == messages[-1]
    rendered, show = [], TextBlock.show_block
    monkeypatch.setattr(TextBlock, "show_block", lambda self, *rest: (rendered.append(self), show(self, *rest)))
    messages[-1] = Message("assistant", paragraphs + " And more")
    page.set_message(99, messages[-1])
    assert 1 <= len(rendered) <= 2
    while page.earlier.isVisibleTo(page):
        page.earlier.click()
    assert [widget.message for widget in page.widgets] == messages


def test_the_plot_describes_its_values(away):
    plot = away.page.plot
    away.page.plot_button.click()
    assert plot.isVisible() and plot.round_trips._in_words() == strings.CHART_EMPTY
    plot.add(Round(0.25, 3.0))
    assert not plot.grab().isNull()
    plot.add(Round(2.4567, 1.0))
    assert plot.round_trips.accessibleDescription() == strings.CHART_VALUES.format("2457 ms", "2457 ms")


def test_reasoning_stands_apart_as_a_quotation(away):
    content = "<think>\n\nTwo and two.\n\n</think>\n\nFour."
    away.page.conversation.show_messages([Message("user", "Question"), Message("assistant", content)])
    texts = answers_of(away)[0].texts
    assert [text.toPlainText() for text in texts] == ["<think>", "Two and two.", "</think>", "Four."]
    indents = [text.document().firstBlock().blockFormat().leftMargin() for text in texts]
    assert min(indents[:3]) > indents[3]


def test_reasoning_that_the_prompt_opened_is_known_by_its_end(away):
    away.page.conversation.show_messages([Message("user", "Question"), Message("assistant", "Two.", finished=False)])
    [answer] = answers_of(away)
    answer.show_message(Message("assistant", "Two.\n\n</think>\n\nFour."))
    indents = [text.document().firstBlock().blockFormat().leftMargin() for text in answer.texts]
    assert min(indents[:2]) > indents[2]
    answer.copy_button.copy()
    assert QGuiApplication.clipboard().text() == "Four."
