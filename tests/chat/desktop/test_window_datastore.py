"""What a window leaves for the next one to copy from."""

from __future__ import annotations

import pytest
from window_driving import TOKEN, ask, wait_for_answer

from moa_chat.chats_datastore import datastore_for
from moa_runtime.bundle import Bundle


@pytest.fixture(autouse=True)
def here(profile, monkeypatch):
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(profile.folder))


def holds(bundle: Bundle, server: str, answer: str, tokenizer) -> bool:
    store = datastore_for("on", bundle, server)
    return store is not None and store.count(tokenizer.encode(answer)[:8]) > 0


def test_answers_of_closed_windows_are_copied_from_until_they_are_deleted(
    connected, open_window, verifier, qtbot, onnx_bundle
):
    bundle, server = Bundle.open(onnx_bundle), f"ws://127.0.0.1:{verifier.port}"
    ask(qtbot, connected)
    answer, tokenizer = wait_for_answer(qtbot, connected), connected.engine.chat.tokenizer
    assert datastore_for("on", bundle, server) is None
    connected.close()
    assert holds(bundle, server, answer, tokenizer)
    window = open_window(server=server, token=TOKEN)
    qtbot.waitUntil(lambda: window.engine.chat is not None)
    window.chats.delete(window.chats.history.chats()[0].id)
    window.close()
    assert datastore_for("on", bundle, server) is None


def test_a_user_may_not_want_that(open_window, verifier, qtbot, onnx_bundle):
    window = open_window(server=f"ws://127.0.0.1:{verifier.port}", token=TOKEN)
    qtbot.waitUntil(lambda: window.engine.chat is not None)
    ask(qtbot, window)
    wait_for_answer(qtbot, window)
    window.open_settings()
    window.settings_dialog.earlier_chats.setCurrentIndex(1)
    window.settings_dialog.save()
    assert not window.settings.earlier_chats
    window.close()
    assert datastore_for("on", Bundle.open(onnx_bundle), f"ws://127.0.0.1:{verifier.port}") is None
