"""The fields for verifier and bundle, on the first-run page and in the settings."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QFormLayout,
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from moa_chat import strings
from moa_chat.desktop.appearance import letters
from moa_chat.desktop.connection import Certificate, ConnectionFailedError, Connector, Trouble
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.widgets import add, label, pad, push_button, restyle
from moa_drafter.catalogue import CATALOGUE
from moa_runtime.address import split_link
from moa_runtime.checked_file import read_checked
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import MODULES

_RADIO_LETTERS = 2.5  # width of a radio button without its words


class TrustQuestion(QFrame):
    """Shows a certificate's fingerprint and what it is good for."""

    trusted = Signal(str)  # the certificate as PEM

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("inner")
        self._certificate: Certificate | None = None
        self.fingerprint = label(says=strings.FINGERPRINT)
        self.fingerprint.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.button = push_button(strings.TRUST, self._trust)
        layout = QVBoxLayout(self)
        pad(layout, 0.8, 0.7, 0.8, 0.7, spacing=0.4)
        add(layout, label(strings.TRUST_QUESTION), self.fingerprint, label(strings.TRUST_COMMAND, "muted"))
        layout.addWidget(self.button, 0, Qt.AlignmentFlag.AlignLeft)
        self.hide()

    def ask(self, certificate: Certificate) -> None:
        self._certificate = certificate
        # Breaks are allowed after each byte, or the label would be as wide as the whole text.
        self.fingerprint.setText(certificate.fingerprint.replace(":", ":\N{ZERO WIDTH SPACE}"))
        self.show()

    def _trust(self) -> None:
        self.hide()
        if self._certificate is not None:
            self.trusted.emit(self._certificate.pem)


class BundleField(QWidget):
    """The bundle in the folder that the user chose; without one, the server's, or the one in the cache."""

    changed = Signal()  # another bundle was chosen

    def __init__(self, connector: Connector, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self._of_server = False
        self._export = connector.export
        self.state = label(says=strings.BUNDLE)
        self.choose = push_button(strings.CHOOSE_FOLDER, self._choose)
        self.default = push_button(strings.USE_DEFAULT, lambda: self._use(""))
        buttons = QHBoxLayout()
        add(buttons, self.choose, self.default)
        buttons.addStretch()
        layout = QVBoxLayout(self)
        pad(layout, 0, spacing=0.4)
        layout.addWidget(self.state)
        layout.addLayout(buttons)
        self._show()

    def set_remote(self, remote: bool) -> None:
        """Take the server's bundle if none is chosen."""
        self._of_server = remote
        self._show()

    def _show(self) -> None:
        usual = strings.BUNDLE_CACHED if self._export.present else strings.BUNDLE_MISSING
        self.state.setText(self.folder or (strings.BUNDLE_OF_SERVER if self._of_server else usual))
        self.default.setVisible(bool(self.folder))

    def _use(self, folder: str) -> None:
        self.folder = folder
        self._show()
        self.changed.emit()

    def _choose(self) -> None:
        if folder := QFileDialog.getExistingDirectory(self, strings.BUNDLE_FOLDER, self.folder):
            self._use(folder)


class ConnectionForm(QWidget):
    """Fields for the verifier's address and, under "Details", its token and certificate, and the bundle."""

    def __init__(self, connector: Connector, settings: Settings) -> None:
        super().__init__()
        self._connector, self._settings = connector, settings
        self.local = QRadioButton(strings.START_LOCAL)
        self.remote = QRadioButton(strings.USE_REMOTE)
        self.server = _field(strings.ADDRESS_EXAMPLE, strings.ADDRESS_NAME, settings.server)
        catalogued = CATALOGUE[strings.TRIAL_TARGET]
        words = strings.model_words(catalogued.target, round(catalogued.size.parameters))
        self._model = label(strings.MODEL_HERE.format(words), "muted")
        self._model.setIndent(letters(_RADIO_LETTERS))
        self.token = _field(strings.TOKEN_HINT, strings.TOKEN_NAME, settings.token)
        self.token.setEchoMode(QLineEdit.EchoMode.Password)
        self._certificate = settings.certificate
        self._certificate_text = label()
        self._forget = push_button(strings.FORGET, lambda: self.trust_certificate(""), says=strings.FORGET_CERTIFICATE)
        self.test = push_button(strings.TEST_CONNECTION, self._test)
        self.state = label(says=strings.CONNECTION_STATE, selectable=True)
        self.trust = TrustQuestion()
        self.trust.trusted.connect(self.trust_certificate)
        self.bundle = BundleField(connector, settings.bundle)
        self.bundle.changed.connect(self._edited)
        self.details = QToolButton()
        self.details.setText(strings.DETAILS)
        self.details.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.details.setCheckable(True)
        self._details = self._make_details()
        layout = QVBoxLayout(self)
        pad(layout, 0, spacing=0.9)
        parts = (self.remote, self.server, self.local, self._model, self.state, self.trust, self.details, self._details)
        layout.addWidget(_card(strings.SERVER, strings.ABOUT_SERVER, *parts))
        (self.local if settings.local or not (settings.server or self._only_remote()) else self.remote).setChecked(True)
        self.local.toggled.connect(self._switched)
        self.details.toggled.connect(self._show_details)
        for line in (self.server, self.token):
            line.textEdited.connect(lambda _: self._edited())
        self.server.textEdited.connect(lambda _: self.remote.setChecked(True))
        self.details.setChecked(any((settings.token, settings.certificate, settings.bundle)))
        self._show_details(self.details.isChecked())
        self._switched()

    def settings(self) -> Settings:
        """Return the settings with the values of the form."""
        local = self.local.isChecked()
        server, linked = split_link(self.server.text().strip())
        return dataclasses.replace(
            self._settings,
            local=local,
            server=self._settings.server if local else server,
            token=self._settings.token if local else linked or self.token.text().strip(),
            certificate=self._certificate,
            bundle=self.bundle.folder,
        )

    def show_problem(self, error: MoaError) -> None:
        """Show the error, focus the field at fault, and offer to trust a certificate that is not trusted."""
        self._say(str(error), "problem")
        if not isinstance(error, ConnectionFailedError):
            return
        if error.certificate is not None:
            self.trust.ask(error.certificate)
        field = {Trouble.ADDRESS: self.server, Trouble.TOKEN: self.token}.get(error.trouble)
        if error.trouble in (Trouble.TOKEN, Trouble.BUNDLE):
            self.details.setChecked(True)
        if field is not None:
            field.setFocus()

    def show_progress(self, words: str) -> None:
        self._say(words, "muted")

    def _make_details(self) -> QWidget:
        details = QWidget()
        form = QFormLayout(details)
        pad(form, 1.3, 0.2, 0, 0.2, spacing=0.5)
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        form.addRow(strings.TOKEN, self.token)
        name = strings.CERTIFICATE_FROM_FILE_NAME
        row = QHBoxLayout()
        row.addWidget(self._certificate_text, 1)
        add(row, self._forget, push_button(strings.CERTIFICATE_FROM_FILE, self._choose_certificate, says=name))
        form.addRow(strings.CERTIFICATE, row)
        form.addRow(strings.BUNDLE, self.bundle)
        form.addRow("", self.test)
        self._show_certificate()
        return details

    @staticmethod
    def _only_remote() -> bool:
        """Whether the packages of a verifier are missing here."""
        return any(find_spec(name) is None for name in MODULES["server"])

    def _show_details(self, shown: bool) -> None:
        self.details.setArrowType(Qt.ArrowType.DownArrow if shown else Qt.ArrowType.RightArrow)
        self._details.setVisible(shown)

    def _switched(self) -> None:
        self.bundle.set_remote(self.remote.isChecked())
        self._edited()

    def _edited(self) -> None:
        self.trust.hide()
        self._say("", "muted")

    def _test(self) -> None:
        self.show_progress(strings.CONNECTING)
        self.trust.hide()
        self.test.setEnabled(False)
        self._connector.test(self.settings(), self._works, self._does_not)

    def _works(self, target: str) -> None:
        self.test.setEnabled(True)
        self._say(strings.CONNECTED.format(target), "good")

    def _does_not(self, error: MoaError) -> None:
        self.test.setEnabled(True)
        self.show_problem(error)

    def _say(self, text: str, style: str) -> None:
        restyle(self.state, style)
        self.state.setText(text)
        self.state.setVisible(bool(text))

    def _choose_certificate(self) -> None:
        name, _ = QFileDialog.getOpenFileName(self, strings.CERTIFICATE_FILE, "", strings.CERTIFICATE_FILES)
        if not name:
            return
        try:
            self.trust_certificate(read_checked(Path(name)).decode("ascii"))
        except (OSError, UnicodeDecodeError):
            self._say(strings.NO_CERTIFICATE.format(name), "problem")

    def trust_certificate(self, pem: str) -> None:
        """Trust only the certificate in this PEM text; an empty text restores the system's authorities."""
        self._certificate = pem
        self._show_certificate()
        self._edited()
        if pem:
            self._test()

    def _show_certificate(self) -> None:
        trusted = bool(self._certificate)
        self._certificate_text.setText(strings.CERTIFICATE_TRUSTED if trusted else strings.CERTIFICATE_CHECKED)
        self._forget.setVisible(trusted)


def _field(placeholder: str, name: str, text: str) -> QLineEdit:
    field = QLineEdit(text)
    field.setPlaceholderText(placeholder)
    field.setAccessibleName(name)
    return field


def _card(title: str, words: str, *fields: QWidget) -> QFrame:
    """Return a frame with a heading, an explanation and fields."""
    card = QFrame()
    card.setObjectName("card")
    layout = QVBoxLayout(card)
    pad(layout, 1, 0.9, 1, 0.9, spacing=0.45)
    add(layout, label(title, "title", wraps=False), label(words, "muted"), *fields)
    return card
