"""Bad input and bad luck: each is one clear sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import ssl
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

from moa_chat import strings
from moa_chat.desktop.app import InstanceLock, run_desktop, with_options
from moa_chat.desktop.connection import Certificate, ConnectionFailedError, fetch_certificate
from moa_chat.desktop.profile import Settings
from moa_chat.options import build_parser
from moa_runtime.bundle import write_manifest
from moa_runtime.events import Disagreement
from moa_runtime.manifest import read_manifest
from moa_runtime.offline_stopping import StoppingRule
from moa_server.offered_bundles import OfferedBundles
from moa_server.settings import Settings as VerifierSettings
from support.chat.desktop.window_driving import (
    AWAY,
    QUESTION,
    TOKEN,
    answered,
    ask,
    can_draft,
    contents,
    link_state,
    wait_for_answer,
)
from support.refusals import refused
from support.server.running import serving


def test_a_newcomer_is_led_to_the_first_answer(open_window, verifier, qtbot, until, profile):
    window = open_window()
    page = window.first_run
    assert page.isVisible() and not window.list.isVisible()
    page.form.details.setChecked(False)  # it was open because the test has a bundle of its own
    page.form.remote.setChecked(True)
    page.start.click()
    until(lambda: page.form.state.objectName() == "problem")
    assert page.start.isVisible() and "address" in page.form.state.text()
    page.form.local.setChecked(True)
    qtbot.keyClicks(page.form.server, f"http://127.0.0.1:{verifier.port}/#token={TOKEN}")
    assert page.form.remote.isChecked(), "whoever types an address wants it"
    page.form.details.click()
    assert page.form.token.isVisible()
    page.form.test.click()
    until(lambda: page.form.state.objectName() == "good")
    qtbot.keyClick(page.form.server, Qt.Key.Key_Return)
    assert page.progress.isVisible() and page.progress.text.endswith(" s)") and not page.start.isVisible()
    until(lambda: window.page.isVisible() and window.page.composer.is_ready())
    assert answered(qtbot, window)
    stored = profile.load()
    assert (stored.server, stored.token) == (f"http://127.0.0.1:{verifier.port}/", TOKEN)
    manifest = window.runtime.chat.manifest
    assert window.windowTitle().startswith(manifest.target)
    words = strings.model_words(manifest.target, manifest.target_parameters)
    assert window.page.model.text() == words != manifest.target


def test_an_address_brings_the_bundle(open_window, engine, onnx_bundle, qtbot, until, monkeypatch, tmp_path):
    """Its bytes are shown, and it can be given up; what came is kept."""
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "none"))
    bundles = OfferedBundles.of([onnx_bundle], engine.fingerprints)
    with serving(engine, VerifierSettings(), bundles=bundles) as verifier:
        window = open_window(bundle="")
        page, parts, cancels = window.first_run, [], [True]

        def shown(received: float, total: float) -> None:
            parts.append((page.progress.bar.value(), page.progress.bar.maximum(), page.progress.text))
            if cancels and received > total / 2:
                cancels.clear()
                page.progress.button.click()

        window.connector.fetching.connect(shown)
        page.form.remote.setChecked(True)
        page.form.server.setText(f"127.0.0.1:{verifier.port}")
        page.start.click()
        until(lambda: page.form.state.objectName() == "problem" and page.start.isVisible())
        value, most, words = parts[-1]
        assert 50 <= value <= most == 100 and " MB (" in words
        page.start.click()
        until(lambda: window.page.isVisible() and window.page.composer.is_ready())
        assert answered(qtbot, window)


class Form:
    """The fields of the first-run page, for an address, and the errors of its tests."""

    def __init__(self, window, until) -> None:
        self.fields, self._until = window.first_run.form, until
        self.fields.remote.setChecked(True)
        self._errors: list[ConnectionFailedError] = []
        show = self.fields.show_problem
        self.fields.show_problem = lambda error: (self._errors.append(error), show(error))

    def problem(self, **fields: str) -> str | None:
        """Test the connection with these fields, and return the error's code."""
        for name, text in fields.items():
            getattr(self.fields, name).setText(text)
        self.fields.test.click()
        self._until(self.fields.test.isEnabled)
        said = self.fields.state.text()
        assert self.fields.state.objectName() == "problem" and said == str(self._errors[-1])
        assert said.endswith(".") and "Traceback" not in said
        return self._errors[-1].code


@pytest.fixture
def form(open_window, until) -> Form:
    return Form(open_window(), until)


def test_each_wrong_field_has_its_code(form, verifier, tmp_path, onnx_bundle):
    assert form.problem(server="") == "address_missing"
    assert form.problem(server="ftp://nowhere") == "bad_address"
    assert form.problem(server=AWAY) == "unreachable"
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert form.problem(server=f"ws://127.0.0.1:{other.server_port}") == "no_websocket"
        other.shutdown()
    assert form.problem(server=f"ws://127.0.0.1:{verifier.port}", token="wrong") == "unauthorized"
    assert form.problem(token="schlüssel") == "not_ascii"
    form.fields.bundle.folder = str(tmp_path / "nothing")
    assert form.problem(token=TOKEN) == "no_bundle"
    form.fields.bundle.folder = str(bundle_of_another_target(onnx_bundle, tmp_path / "other"))
    assert form.problem() == "other_bundle"


@pytest.mark.parametrize("address", ["garbage", "http://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_reported(address, form, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", address)
    monkeypatch.setenv("NO_PROXY", "")
    form.problem(server="ws://verifier.example:8765")
    assert "proxy" in form.fields.state.text()


def bundle_of_another_target(bundle: Path, folder: Path) -> Path:
    shutil.copytree(bundle, folder)
    manifest = read_manifest(bundle)
    (folder / "manifest.json").unlink()
    other = dataclasses.replace(manifest.fingerprints, target="f" * 32)
    write_manifest(folder, dataclasses.replace(manifest, fingerprints=other))
    return folder


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate and its key."""
    folder.mkdir()
    files = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=verifier"]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True, timeout=60)
    return files


@pytest.fixture
def encrypted(verifier, tmp_path) -> Iterator[tuple[str, Path]]:
    """The address of a TLS end in front of the verifier, and its certificate."""
    from websockets.sync.client import connect

    files = self_signed(tmp_path / "own")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)

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
        yield f"wss://127.0.0.1:{server.socket.getsockname()[1]}", files[0]
        server.shutdown()
        thread.join()


def test_only_a_trusted_self_signed_certificate_is_accepted(form, encrypted, tmp_path, until):
    (address, certificate), fields = encrypted, form.fields
    assert form.problem(server=address, token=TOKEN) == "untrusted_certificate" and fields.trust.isVisible()
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", certificate]
    expected = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert expected.strip().partition("=")[2] == fields.trust.fingerprint.text().replace("\N{ZERO WIDTH SPACE}", "")
    fields.trust.button.click()
    until(lambda: fields.state.objectName() == "good")
    assert fields.settings().certificate == certificate.read_text()
    other, _ = self_signed(tmp_path / "other")
    fields.trust_certificate(other.read_text())
    until(lambda: fields.state.objectName() == "problem")
    assert form.problem() == "untrusted_certificate"


def test_certificates_that_cannot_be_read_are_refused():
    with refused("certificate_unreadable"):
        fetch_certificate("wss://127.0.0.1:9")
    with refused("damaged"):
        Certificate("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n").context()


@pytest.mark.parametrize("book", ["word " * 40_000, "x" * 200_000], ids=["words", "one word"])
def test_a_pasted_book_is_refused_and_not_lost(connected, qtbot, until, book):
    composer = connected.page.composer
    QApplication.clipboard().setText(book)
    composer.field.paste()
    composer.send()
    until(lambda: connected.page.notice.text)
    assert composer.text == book.strip() and not connected.chats.busy
    assert connected.chats.messages == [] and connected.chats.history.chats() == []
    # A long word would make the field slow if its lines were broken between words.
    assert (composer.field.wordWrapMode() is QTextOption.WrapMode.WrapAnywhere) is ("word" not in book)
    composer.field.clear()
    assert answered(qtbot, connected)


def test_a_damaged_history_is_kept_aside_and_reported(profile, open_window):
    profile.history_path.write_bytes(b"damaged")
    window = open_window(server=AWAY)
    aside = window.chats.history.set_aside
    assert aside.read_bytes() == b"damaged" and window.page.notice.isVisible()
    assert window.page.notice.text == strings.HISTORY_DAMAGED.format(aside)


def test_a_verifier_that_is_away_does_not_keep_the_window_closed(away, qtbot, until):
    until(away.page.composer.is_ready)
    until(lambda: link_state(away).startswith("reconnecting in"))
    ask(qtbot, away)
    away.chats.stop()
    until(lambda: not away.chats.busy)
    assert away.page.composer.text == QUESTION, "nothing was confirmed: the question is in the field again"


def test_a_refused_token_leads_to_the_settings_and_another_address_is_connected_to(open_window, verifier, qtbot, until):
    window = open_window(server=f"ws://127.0.0.1:{verifier.port}", token="wrong")
    until(lambda: window.page.notice.button.text() == strings.SETTINGS)
    window.page.notice.button.click()
    window.settings_dialog.form.token.setText(TOKEN)
    window.settings_dialog.save()
    until(lambda: link_state(window) == "online")
    qtbot.mouseClick(window.list.settings_button, Qt.MouseButton.LeftButton)
    window.settings_dialog.form.server.setText(f"ws://localhost:{verifier.port}")
    window.settings_dialog.save()
    assert link_state(window) == strings.CONNECTING_STATE
    until(lambda: link_state(window) == "online")
    assert answered(qtbot, window)


def test_the_user_decides_which_version_counts(connected, monkeypatch, profile):
    kept, page = [], connected.page
    monkeypatch.setattr(connected.runtime, "keep_mine", lambda: kept.append(True))

    def disagree() -> None:
        connected.chats.handle_disagreement(Disagreement(3, 12, "the device's words", "the server's words"))

    disagree()  # by default the server's version stays, unless the user undoes that
    assert not page.disagreement.isVisible() and kept == []
    assert page.notice.text == strings.CORRECTED_WORDS.format(3)
    page.notice.button.click()
    assert kept == [True] and not page.notice.isVisible()
    connected.settings = dataclasses.replace(connected.settings, disagreement="ask")
    disagree()
    versions = strings.VERSIONS.format("the device's words", "the server's words")
    assert page.disagreement.isVisible() and page.disagreement.versions.text() == versions
    page.disagreement.theirs.click()
    assert not page.disagreement.isVisible() and kept == [True]
    disagree()
    page.disagreement.always.setChecked(True)
    page.disagreement.mine.click()
    assert kept == [True] * 2 and profile.load().disagreement == "mine"
    disagree()
    assert kept == [True] * 3 and not page.disagreement.isVisible()


def test_text_written_offline_can_be_kept(connected, steps, qtbot, until, monkeypatch):
    """The untrained drafter disagrees with the target: the question comes, and "keep mine" is obeyed."""
    monkeypatch.setattr(StoppingRule, "may_continue", lambda _, text, unconfirmed, logprob: unconfirmed < 40)
    connected.settings = dataclasses.replace(connected.settings, max_new_tokens=60, disagreement="ask")
    chats, banner = connected.chats, connected.page.disagreement
    ask(qtbot, connected)
    until(lambda: can_draft(connected))
    connected.page.offline.click()
    until(lambda: len(connected.runtime.chat._session.tentative) == 40)
    written = chats.messages[-1].content
    steps.release(1000)
    connected.page.offline.click()
    until(banner.isVisible)
    banner.mine.click()
    until(lambda: chats.messages[-1].content.startswith(written[:40]))
    wait_for_answer(qtbot, connected)
    answer = chats.messages[-1]
    assert "kept" in {span.origin.value for span in answer.spans} and answer.content.startswith(written[:40])
    assert strings.AS_WRITTEN in answer.figures and strings.CORRECTED not in answer.figures


def test_a_deleted_chat_can_be_restored_and_renamed(connected, qtbot):
    text = answered(qtbot, connected)
    connected.list.delete_current()
    assert connected.list.items() == [] and connected.chats.messages == []
    connected.page.notice.button.click()
    assert contents(connected.chats.messages) == [QUESTION, text]
    connected.list.items()[0].setText("Colours")
    assert connected.page.title.text() == "Colours"


def test_a_second_window_finds_the_first(profile, until, monkeypatch, options):
    lock, other = InstanceLock(profile.folder), InstanceLock(profile.folder)
    wanted, said = [], []
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
    until(lambda: caller.state() is QProcess.ProcessState.NotRunning)
    assert caller.exitCode() == 0 and wanted == [True]
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(profile.folder))
    monkeypatch.setattr(QMessageBox, "exec", lambda box: said.append(box.text()) or 0)
    assert run_desktop(options) == 0 and said == [strings.ALREADY_OPEN]
    lock.release()
    assert other.take()
    other.release()


def test_the_command_line_counts_more_than_the_profile(monkeypatch):
    monkeypatch.delenv("MOA_SERVER", raising=False)
    monkeypatch.setenv("MOA_TOKEN", "from the environment")
    own = {"max_new_tokens": 99, "temperature": 0.5, "recommended": False}
    stored = Settings(server="wss://stored", token="stored", certificate="PEM", **own)
    assert with_options(stored, build_parser().parse_args([])) == stored
    given = build_parser().parse_args(["--server", "ws://given", "--max-new-tokens", "7", "--policy", "keep"])
    changed = with_options(stored, given)
    assert (changed.server, changed.token, changed.certificate) == ("ws://given", "from the environment", "")
    assert (changed.max_new_tokens, changed.temperature, changed.disagreement) == (7, 0.5, "mine")
    assert with_options(stored, build_parser().parse_args(["--local"])).local
