"""Bad input and bad luck: each is one clear sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PySide6.QtCore import QProcess, Qt
from PySide6.QtGui import QTextOption
from PySide6.QtWidgets import QApplication, QMessageBox
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from moa_chat.desktop.app import InstanceLock
from moa_chat.desktop.connection import Certificate, fetch_certificate
from moa_chat.desktop.profile import Profile, Settings
from moa_runtime.bundle import read_manifest, write_manifest
from moa_runtime.errors import MoaError
from moa_runtime.events import Disagreement
from support.chat.desktop.window_driving import QUESTION, TOKEN, WAIT, ask, wait_for_answer


def test_a_newcomer_is_led_to_the_first_answer(open_window, verifier, qtbot, profile):
    window = open_window()
    page = window.first_run
    assert page.isVisible() and not window.list.isVisible()
    page.form.remote.setChecked(True)
    assert not page.start.isEnabled(), "there is no address yet"
    qtbot.keyClicks(page.form.server, f"127.0.0.1:{verifier.port}")
    qtbot.keyClicks(page.form.token, TOKEN)
    page.form.test.click()
    qtbot.waitUntil(lambda: "Connected" in page.form.state.text(), timeout=WAIT)
    page.start.click()
    qtbot.waitUntil(lambda: window.page.isVisible() and window.page.composer.is_ready(), timeout=WAIT)
    ask(qtbot, window)
    assert wait_for_answer(qtbot, window)
    stored = profile.load()
    assert (stored.server, stored.token) == (f"127.0.0.1:{verifier.port}", TOKEN)


@pytest.fixture
def form(open_window):
    """The fields of the first-run page, for an address."""
    form = open_window().first_run.form
    form.remote.setChecked(True)
    return form


def problem(form, qtbot, **fields: str) -> str:
    """What the form says after a test with these fields."""
    for name, text in fields.items():
        getattr(form, name).setText(text)
    form.test.click()
    qtbot.waitUntil(form.test.isEnabled, timeout=WAIT)
    assert form.state.objectName() == "problem"
    return form.state.text()


def test_each_wrong_field_has_its_sentence(form, verifier, qtbot, tmp_path, onnx_bundle):
    right = f"ws://127.0.0.1:{verifier.port}"
    assert "Enter the verifier's address" in problem(form, qtbot, server="")
    assert "no verifier address" in problem(form, qtbot, server="ftp://nowhere")
    assert "No verifier answers" in problem(form, qtbot, server="ws://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert "no moa-edge verifier" in problem(form, qtbot, server=f"ws://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert "refused the token" in problem(form, qtbot, server=right, token="wrong")
    assert "ASCII" in problem(form, qtbot, token="schlüssel")
    form.bundle.folder = str(tmp_path / "nothing")
    assert "no bundle" in problem(form, qtbot, token=TOKEN)
    form.bundle.folder = str(other_targets_bundle(onnx_bundle, tmp_path / "other"))
    assert "does not fit the verifier" in problem(form, qtbot)
    sentences = form.state.text()
    assert sentences.endswith(".") and "Traceback" not in sentences


@pytest.mark.parametrize(
    ("address", "said"), [("garbage", "no valid address"), ("http://127.0.0.1:9", "does not lead to")]
)
def test_a_proxy_that_cannot_be_used_is_told(address, said, form, qtbot, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", address)
    monkeypatch.setenv("NO_PROXY", "")
    told = problem(form, qtbot, server="ws://verifier.example:8765")
    assert told.startswith("The proxy that the environment names ") and said in told


def other_targets_bundle(bundle: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in bundle.iterdir():
        (folder / file.name).symlink_to(file)
    manifest = read_manifest(bundle)
    (folder / "manifest.json").unlink()
    other = dataclasses.replace(manifest.fingerprints, target="f" * 32)
    write_manifest(folder, dataclasses.replace(manifest, fingerprints=other))
    return folder


@pytest.fixture
def self_signed(tmp_path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=verifier"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    return certificate, key


@pytest.fixture
def encrypted(verifier, self_signed) -> Iterator[int]:
    """The port of a TLS end in front of the verifier."""
    from websockets.sync.client import connect

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*self_signed)

    def forward(source, target) -> None:
        with contextlib.suppress(ConnectionClosed):
            for frame in source:
                target.send(frame)

    def handle(client) -> None:
        headers = {"Authorization": client.request.headers.get("Authorization", "")}
        with connect(verifier.url, additional_headers=headers, max_size=None) as server:
            threading.Thread(target=forward, args=(server, client), daemon=True).start()
            forward(client, server)

    with serve(handle, "127.0.0.1", 0, ssl=context, max_size=None, close_timeout=1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join()


def test_a_self_signed_certificate_is_explained_and_can_be_trusted(form, encrypted, self_signed, qtbot):
    said = problem(form, qtbot, server=f"wss://127.0.0.1:{encrypted}", token=TOKEN)
    assert "No authority vouches" in said and form.trust.isVisible()
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", self_signed[0]]
    expected = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert expected.strip().partition("=")[2] == form.trust.fingerprint.text().replace("\N{ZERO WIDTH SPACE}", "")
    form.trust.button.click()
    qtbot.waitUntil(lambda: "Connected" in form.state.text(), timeout=WAIT)
    assert form.settings().certificate == self_signed[0].read_text()


def test_only_the_trusted_certificate_is_trusted(form, encrypted, tmp_path, qtbot):
    other = tmp_path / "other"
    other.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=verifier"]
    files = ["-keyout", other / "key.pem", "-out", other / "cert.pem"]
    subprocess.run([*command, *files], check=True, capture_output=True, timeout=60)
    form.trust_certificate((other / "cert.pem").read_text())
    qtbot.waitUntil(form.test.isEnabled, timeout=WAIT)
    assert "another certificate" in problem(form, qtbot, server=f"wss://127.0.0.1:{encrypted}", token=TOKEN)


def test_certificates_that_cannot_be_read(self_signed):
    with pytest.raises(MoaError, match="could not be read"):
        fetch_certificate("wss://127.0.0.1:9")
    with pytest.raises(MoaError, match="damaged"):
        Certificate("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n").context()


@pytest.mark.parametrize("book", ["word " * 40_000, "x" * 200_000], ids=["words", "one word"])
def test_a_pasted_book_is_refused_and_not_lost(connected, qtbot, book):
    QApplication.clipboard().setText(book)
    connected.page.composer.field.paste()
    connected.page.composer.send()
    qtbot.waitUntil(lambda: "context holds" in connected.page.notice.text, timeout=WAIT)
    assert connected.page.composer.text == book.strip() and not connected.chats.busy
    assert connected.chats.messages == [] and connected.chats.history.chats() == []
    # A long word would make the field slow if its lines were broken between words.
    anywhere = connected.page.composer.field.wordWrapMode() is QTextOption.WrapMode.WrapAnywhere
    assert anywhere is ("word" not in book)
    connected.page.composer.field.clear()
    ask(qtbot, connected)
    assert wait_for_answer(qtbot, connected)


def test_a_damaged_history_is_kept_aside_and_said(profile, open_window):
    profile.history_path.write_bytes(b"damaged")
    window = open_window(server="ws://127.0.0.1:9")
    aside = window.chats.history.set_aside
    assert aside.read_bytes() == b"damaged"
    assert str(aside) in window.page.notice.text and window.page.notice.isVisible()


def test_a_verifier_that_is_away_does_not_keep_the_window_closed(open_window, qtbot, verifier):
    window = open_window(server="ws://127.0.0.1:9")
    qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
    qtbot.waitUntil(lambda: "offline" in window.page.pill.text(), timeout=WAIT)
    ask(qtbot, window)
    window.chats.stop()
    qtbot.waitUntil(lambda: not window.chats.busy, timeout=WAIT)
    assert window.page.composer.text == QUESTION, "nothing was confirmed: the question is in the field again"


def test_a_refused_token_leads_to_the_settings(open_window, verifier, qtbot):
    window = open_window(server=f"ws://127.0.0.1:{verifier.port}", token="wrong")
    qtbot.waitUntil(lambda: "refused the token" in window.page.notice.text, timeout=WAIT)
    window.page.notice.button.click()
    dialog = window.settings_dialog
    dialog.form.token.setText(TOKEN)
    dialog.save()
    qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() == "online", timeout=WAIT)


def test_another_address_is_connected_to_at_once(connected, verifier, qtbot):
    qtbot.mouseClick(connected.list.settings_button, Qt.MouseButton.LeftButton)
    connected.settings_dialog.form.server.setText(f"ws://localhost:{verifier.port}")
    connected.settings_dialog.save()
    assert connected.page.pill.accessibleDescription() == "connecting"
    qtbot.waitUntil(lambda: connected.page.pill.accessibleDescription() == "online", timeout=WAIT)
    ask(qtbot, connected)
    assert wait_for_answer(qtbot, connected)


def test_the_server_s_version_stands_unless_one_takes_it_back(connected, monkeypatch):
    kept = []
    monkeypatch.setattr(connected.runtime, "keep_mine", lambda: kept.append(True))
    connected.chats.handle_disagreement(Disagreement(3, 12, "the device's words", "the server's words"))
    assert not connected.page.disagreement.isVisible() and kept == []
    assert connected.page.notice.text == "3 words that this device wrote were corrected."
    connected.page.notice.button.click()
    assert kept == [True] and not connected.page.notice.isVisible()


def test_the_user_decides_who_is_right(connected, qtbot, monkeypatch, profile):
    kept = []
    connected.settings = dataclasses.replace(connected.settings, disagreement="ask")
    monkeypatch.setattr(connected.runtime, "keep_mine", lambda: kept.append(True))
    banner = connected.page.disagreement
    disagreement = Disagreement(3, 12, "the device's words", "the server's words")

    def disagree() -> None:
        connected.chats.handle_disagreement(disagreement)

    disagree()
    assert banner.isVisible() and "the device's words" in banner.versions.text()
    banner.theirs.click()
    assert not banner.isVisible() and kept == []
    disagree()
    banner.always.setChecked(True)
    banner.mine.click()
    assert kept == [True] and profile.load().disagreement == "mine"
    disagree()
    assert kept == [True, True] and not banner.isVisible()


def test_what_was_written_offline_can_be_kept(connected, qtbot):
    """Greedy and random, target and drafter disagree soon: the question comes, and "keep mine" is obeyed."""
    connected.settings = dataclasses.replace(connected.settings, max_new_tokens=60, disagreement="ask")
    banner = connected.page.disagreement
    for number in range(1, 6):
        ask(qtbot, connected)
        qtbot.waitUntil(lambda: len(connected.chats.messages) == 2 * number, timeout=WAIT)  # noqa: B023
        qtbot.waitUntil(lambda: any(span.committed for span in connected.chats.messages[-1].spans), timeout=WAIT)
        connected.page.offline.click()
        qtbot.waitUntil(lambda: len(connected.chats.messages[-1].content) > 40, timeout=WAIT)
        written = connected.chats.messages[-1].content
        connected.page.offline.click()
        qtbot.waitUntil(lambda: banner.isVisible() or not connected.chats.busy, timeout=WAIT)
        if banner.isVisible():  # on a busy machine an answer may be whole before the click is heard
            break
    banner.mine.click()
    qtbot.waitUntil(lambda: connected.chats.messages[-1].content.startswith(written[:40]), timeout=WAIT)
    wait_for_answer(qtbot, connected)
    answer = connected.chats.messages[-1]
    assert "kept" in {span.origin.value for span in answer.spans} and answer.content.startswith(written[:40])
    assert "as this device wrote it, not confirmed" in answer.figures and "corrected" not in answer.figures


def test_a_deleted_chat_can_be_taken_back(connected, qtbot):
    ask(qtbot, connected)
    text = wait_for_answer(qtbot, connected)
    connected.list.delete_current()
    assert connected.list.items() == [] and connected.chats.messages == []
    connected.page.notice.button.click()
    assert [message.content for message in connected.chats.messages] == [QUESTION, text]
    connected.list.items()[0].setText("Colours")
    assert connected.page.title.text() == "Colours"


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_the_token_is_its_owners_alone(profile):
    profile.save(Settings(token="very secret"))
    path = profile.folder / "settings.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(profile.folder.stat().st_mode) == 0o700
    assert profile.load().token == "very secret" and "very secret" not in repr(profile.load())


@pytest.mark.parametrize("content", ["", "nonsense", "[]", json.dumps({"zoom": "large", "token": 5, "new": 1})])
def test_damaged_settings_are_the_defaults(profile, content):
    (profile.folder / "settings.json").write_text(content)
    assert profile.load() == Settings()


def test_a_second_window_finds_the_first(profile, qtbot):
    lock, other = InstanceLock(profile.folder), InstanceLock(profile.folder)
    wanted = []
    lock.wanted.connect(lambda: wanted.append(True))
    assert lock.take() and not other.take()
    caller = QProcess()
    script = (
        "import sys; from pathlib import Path; from PySide6.QtCore import QCoreApplication\n"
        "from moa_chat.desktop.app import InstanceLock\n"
        "application = QCoreApplication([]); lock = InstanceLock(Path(sys.argv[1]))\n"
        "sys.exit(0 if not lock.take() and lock.call_other() else 1)"
    )
    caller.start(sys.executable, ["-c", script, str(profile.folder)])
    qtbot.waitUntil(lambda: caller.state() is QProcess.ProcessState.NotRunning, timeout=WAIT)
    assert caller.exitCode() == 0 and wanted == [True]
    lock.release()
    assert other.take()
    other.release()


def test_a_second_window_says_so(profile, qtbot, monkeypatch, options):
    from moa_chat.desktop.app import run_desktop

    lock = InstanceLock(profile.folder)
    assert lock.take()
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(profile.folder))
    said = []
    monkeypatch.setattr(QMessageBox, "exec", lambda box: said.append(box.text()) or 0)
    assert run_desktop(options) == 0
    assert said == ["moa-chat is already open with this profile."]
    lock.release()


def test_a_profile_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoaError, match="profile folder"):
        Profile(tmp_path / "file" / "profile")


def test_the_command_line_counts_more_than_the_profile(monkeypatch):
    from moa_chat.desktop.app import with_options
    from moa_chat.options import build_parser

    monkeypatch.delenv("MOA_SERVER", raising=False)
    monkeypatch.setenv("MOA_TOKEN", "from the environment")
    stored = Settings(
        server="wss://stored", token="stored", certificate="PEM", max_new_tokens=99, temperature=0.5, recommended=False
    )
    assert with_options(stored, build_parser().parse_args([])) == stored
    given = build_parser().parse_args(["--server", "ws://given", "--max-new-tokens", "7", "--policy", "keep"])
    changed = with_options(stored, given)
    assert (changed.server, changed.token, changed.certificate) == ("ws://given", "from the environment", "")
    assert (changed.max_new_tokens, changed.temperature, changed.disagreement) == (7, 0.5, "mine")
    assert with_options(stored, build_parser().parse_args(["--local"])).local
