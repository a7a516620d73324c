"""Settings of one chat: instructions, length, and how words are chosen."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QApplication, QLabel

from moa_chat.desktop.app import with_options
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.settings_dialog import ChatSettingsDialog, DecimalField
from moa_chat.history.chat_settings import ChatSettings, sampling_of
from moa_chat.history.message import Message
from moa_chat.options import build_parser
from moa_runtime.bundle import write_manifest
from moa_runtime.conversation import Unconfirmed
from moa_runtime.manifest import RecommendedSampling, read_manifest
from moa_runtime.session.events import Grammar, Sampling
from support.chat.desktop.window_driving import AWAY, QUESTION, answered

SYSTEM = "You are terse.\nYou never say please."


@pytest.fixture
def recommending(onnx_bundle):
    """The bundle, with a recommendation of sampling."""
    before = read_manifest(onnx_bundle)
    write_manifest(onnx_bundle, dataclasses.replace(before, sampling=RecommendedSampling(0.2, 0.9)))
    yield
    write_manifest(onnx_bundle, before)


def sampling(window) -> Sampling:
    return window.runtime.chat._session.sampling


@pytest.mark.parametrize("language", ["de_DE", "fr_FR", "en_US", "de_CH"])
@pytest.mark.parametrize("typed", ["0.7", "0,7", ".7", ",7", "0.70"])
def test_numbers_have_a_point_or_a_comma_in_every_language(qtbot, language, typed):
    field = DecimalField()
    field.setLocale(QLocale(language))
    field.setRange(0, 2)
    qtbot.addWidget(field)
    field.selectAll()
    qtbot.keyClicks(field, typed)
    field.interpretText()
    assert field.value() == 0.7


def test_a_chat_has_settings_of_its_own(connected, open_window, qtbot):
    """Its questions are asked with them; other chats keep theirs, also in the next window."""
    connected.open_chat_settings()
    dialog = connected.chat_settings_dialog
    dialog.form.system.setPlainText(SYSTEM)
    dialog.form.recommended.setChecked(False)
    dialog.form.temperature.setValue(0.5)
    dialog.form.top_p.setValue(0.8)
    dialog.save()
    answered(qtbot, connected)
    chat = connected.chats.current
    assert connected.runtime.chat.messages[0] == connected.chats.turns[0] == {"role": "system", "content": SYSTEM}
    assert (sampling(connected).temperature, sampling(connected).top_p) == (0.5, 0.8)
    connected.new_chat()
    answered(qtbot, connected, "And now?")
    assert connected.runtime.chat.messages[0]["role"] == "user" and sampling(connected) == Sampling()
    connected.close()
    again = open_window(server=AWAY, max_new_tokens=99)
    assert again.chats.settings == ChatSettings(max_new_tokens=99)
    again.chats.open_chat(chat)
    assert again.chats.settings == ChatSettings(SYSTEM, 24, False, 0.5, 0.8)


def test_new_chats_begin_with_the_general_settings(open_window):
    window = open_window(server=AWAY, system="Be brief.")
    window.open_settings()
    form = window.settings_dialog.of_chats
    assert form.system.toPlainText() == "Be brief." and form.recommended.isChecked()
    assert not form.temperature.isVisibleTo(form)
    form.system.setPlainText(SYSTEM)
    form.recommended.setChecked(False)
    assert form.temperature.isVisibleTo(form)
    form.temperature.setValue(1.2)
    window.settings_dialog.save()
    assert window.chats.settings == window.settings.of_new_chats == ChatSettings(SYSTEM, 24, False, 1.2, 1.0)


def test_the_recommendation_of_the_bundle_is_followed_and_named(recommending, connected, qtbot):
    connected.open_chat_settings()
    assert "0.2" in connected.chat_settings_dialog.form._said.text()
    connected.chat_settings_dialog.reject()
    answered(qtbot, connected)
    assert (sampling(connected).temperature, sampling(connected).top_p) == (0.2, 0.9)


@pytest.mark.parametrize(
    ("settings", "recommended", "wanted"),
    [
        (ChatSettings(), None, Sampling()),
        (ChatSettings(), RecommendedSampling(0.2, 0.9), Sampling(0.2, 0.9, 5)),
        (ChatSettings(recommended=False), RecommendedSampling(0.2, 0.9), Sampling()),
        (ChatSettings(recommended=False, temperature=1.0, top_p=0.5), None, Sampling(1.0, 0.5, 5)),
        (ChatSettings(as_json=True), None, Sampling(grammar=Grammar("json_object"))),
        (ChatSettings(as_json=True, schema="{}"), None, Sampling(grammar=Grammar("json_schema", "{}"))),
        (ChatSettings(schema="{}"), None, Sampling()),
    ],
)
def test_settings_choose_the_sampling(settings, recommended, wanted):
    assert sampling_of(settings, recommended, 5) == wanted


def test_the_command_line_chooses_the_sampling_of_new_chats():
    given = with_options(Settings(), build_parser().parse_args(["--temperature", "0"]))
    assert not given.recommended and given.temperature == 0
    given = with_options(Settings(), build_parser().parse_args(["--top-p", "0.5", "--temperature", "0.7"]))
    assert given.of_new_chats == ChatSettings(recommended=False, temperature=0.7, top_p=0.5)
    assert with_options(Settings(), build_parser().parse_args([])).recommended


def test_a_check_is_made_with_the_chats_own_instructions(open_online, history, until):
    chat = history.create("Colours", ChatSettings(SYSTEM))
    unconfirmed = Message("assistant", "No.", unconfirmed=Unconfirmed(1, Sampling(), 16))
    history.replace(chat, 0, [Message("user", QUESTION), unconfirmed])
    window = open_online(system="Something else.")
    until(lambda: window.chats.history.unconfirmed() == [])
    assert window.runtime.chat.messages[0] == {"role": "system", "content": SYSTEM}


@pytest.mark.parametrize("recommended", [True, False])
def test_no_row_of_the_dialog_lies_over_another(away, recommended):
    away.open_chat_settings()
    dialog = away.chat_settings_dialog
    form = dialog.form
    form.recommended.setChecked(recommended)
    assert not form.schema.isVisible()
    form.as_json.setChecked(True)
    for width in (dialog.width(), dialog.minimumWidth()):
        dialog.resize(width, 0)
        QApplication.processEvents()
        rows = [form.system, form.max_new_tokens, form.recommended]
        rows += [form._said] if recommended else [form.temperature, form.top_p]
        rows += [form.as_json, form.schema]
        for above, below in pairwise(rows):
            assert above.geometry().bottom() < below.geometry().top(), (width, below)
        for label in dialog.findChildren(QLabel):
            assert not label.isVisible() or label.height() >= label.heightForWidth(label.width()), label.text()


@pytest.mark.parametrize("zoom", [100, 200])
def test_a_number_is_seen_whole_and_read_by_screen_readers(qtbot, appearance, zoom):
    appearance.set_zoom(zoom)
    settings = ChatSettings(SYSTEM, 300, False, 0.35, 0.9, True, '{"type": "array"}')
    dialog = ChatSettingsDialog("Colours", settings, None)
    qtbot.addWidget(dialog)
    dialog.show()
    numbers = (dialog.form.temperature, dialog.form.top_p)
    assert all(
        field.accessibleName()
        for field in (*numbers, dialog.form.system, dialog.form.max_new_tokens, dialog.form.schema)
    )
    for field in numbers:
        line, frame = field.lineEdit(), field.rect().adjusted(2, 2, -2, -2)
        assert frame.contains(line.geometry()) and line.width() > 2 * line.fontMetrics().horizontalAdvance(field.text())
    with qtbot.waitSignal(dialog.saved) as saved:
        dialog.save()
    assert saved.args == [settings]
