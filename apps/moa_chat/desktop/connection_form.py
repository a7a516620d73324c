"""The fields for verifier and bundle, on the first-run page and in the settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QFormLayout,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPushButton,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from moa_chat.desktop.bundle_field import BundleField
from moa_chat.desktop.connection_errors import ConnectionFailedError, Trouble
from moa_chat.desktop.connector import Connector
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.style import lines
from moa_chat.desktop.trust import TrustQuestion
from moa_runtime.errors import MoaError


class ConnectionForm(QWidget):
    """Where the verifier is, with which token and certificate, and which bundle to use.

    Signals:
        changed: something was chosen or written.
    """

    changed = Signal()

    def __init__(self, connector: Connector, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._connector = connector
        self._settings = settings
        self.local = QRadioButton("Start one on this machine, for as long as the window is open")
        self.remote = QRadioButton("Connect to one at an address")
        self.server = _field("wss://host:8765", "Address of the verifier", settings.server)
        self.token = _field("leave empty if it asks for none", "Token of the verifier", settings.token)
        self.token.setEchoMode(QLineEdit.EchoMode.Password)
        self._certificate = settings.certificate
        self._certificate_text = QLabel()
        self._certificate_text.setWordWrap(True)
        self._forget = QPushButton("Forget")
        self._forget.setAccessibleName("Forget the trusted certificate")
        self._forget.clicked.connect(lambda: self.trust_certificate(""))
        self.test = QPushButton("Test the connection")
        self.test.clicked.connect(self._test)
        self.state = QLabel()
        self.state.setWordWrap(True)
        self.state.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.state.setAccessibleName("State of the connection")
        self.trust = TrustQuestion()
        self.trust.trusted.connect(self.trust_certificate)
        self.bundle = BundleField(connector, settings.bundle)
        self.bundle.changed.connect(self.changed)
        self._details = self._make_details()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(lines(0.9))
        verifier, fields = _card("Verifier", "The server with the large model, which checks what this device writes.")
        for widget in (self.local, self.remote, self._details, self.state, self.trust):
            fields.addWidget(widget)
        layout.addWidget(verifier)
        bundle, fields = _card("Bundle", "The small model for this device. It has to be made for the verifier's model.")
        fields.addWidget(self.bundle)
        layout.addWidget(bundle)
        (self.remote if settings.server else self.local).setChecked(True)
        self.local.toggled.connect(self._switched)
        for line in (self.server, self.token):
            line.textEdited.connect(lambda _: self._edited())
        self._switched()

    def settings(self) -> Settings:
        """The settings with what the form says."""
        local = self.local.isChecked()
        return dataclasses.replace(
            self._settings,
            local=local,
            server=self._settings.server if local else self.server.text().strip(),
            token=self._settings.token if local else self.token.text().strip(),
            certificate=self._certificate,
            bundle=self.bundle.folder,
        )

    def show_problem(self, error: MoaError) -> None:
        """Say what is wrong, and offer to trust a certificate where that is all."""
        self._say(str(error), "problem")
        if not isinstance(error, ConnectionFailedError):
            return
        if error.certificate is not None:
            self.trust.ask(error.certificate)
        field = {Trouble.ADDRESS: self.server, Trouble.TOKEN: self.token}.get(error.trouble)
        if field is not None:
            field.setFocus()

    def show_progress(self, words: str) -> None:
        self._say(words, "muted")

    def _make_details(self) -> QWidget:
        details = QWidget()
        form = QFormLayout(details)
        form.setContentsMargins(lines(1.3), lines(0.2), 0, lines(0.2))
        form.setSpacing(lines(0.5))
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapLongRows)
        form.addRow("Address", self.server)
        form.addRow("Token", self.token)
        row = QHBoxLayout()
        row.addWidget(self._certificate_text, 1)
        row.addWidget(self._forget)
        choose = QPushButton("From a file…")
        choose.setAccessibleName("Trust the certificate in a file")
        choose.clicked.connect(self._choose_certificate)
        row.addWidget(choose)
        form.addRow("Certificate", row)
        form.addRow("", self.test)
        self._show_certificate()
        return details

    def _switched(self) -> None:
        self._details.setVisible(self.remote.isChecked())
        self._edited()

    def _edited(self) -> None:
        self.trust.hide()
        self._say("", "muted")
        self.changed.emit()

    def _test(self) -> None:
        self.show_progress("Connecting…")
        self.trust.hide()
        self.test.setEnabled(False)
        self._connector.test(self.settings(), self._works, self._does_not)

    def _works(self, target: str) -> None:
        self.test.setEnabled(True)
        self._say(f"Connected. The verifier serves {target}, as this bundle wants it.", "good")

    def _does_not(self, error: MoaError) -> None:
        self.test.setEnabled(True)
        self.show_problem(error)

    def _say(self, text: str, kind: str) -> None:
        self.state.setObjectName(kind)
        self.state.style().polish(self.state)
        self.state.setText(text)
        self.state.setVisible(bool(text))

    # -- the certificate -----------------------------------------------------------------------

    def _choose_certificate(self) -> None:
        name, _ = QFileDialog.getOpenFileName(self, "Certificate of the verifier", "", "Certificates (*.pem *.crt)")
        if not name:
            return
        try:
            self.trust_certificate(Path(name).read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError):
            self._say(f"{name} is no certificate in PEM format.", "problem")

    def trust_certificate(self, pem: str) -> None:
        """Trust the certificate in this PEM text alone, or with an empty one the system's authorities."""
        self._certificate = pem
        self._show_certificate()
        self._edited()
        if pem:
            self._test()

    def _show_certificate(self) -> None:
        trusted = bool(self._certificate)
        self._certificate_text.setText("trusted by you" if trusted else "checked by the system")
        self._forget.setVisible(trusted)


def _field(placeholder: str, name: str, text: str) -> QLineEdit:
    field = QLineEdit(text)
    field.setPlaceholderText(placeholder)
    field.setAccessibleName(name)
    return field


def _card(title: str, words: str) -> tuple[QFrame, QVBoxLayout]:
    """A frame with a heading, and where its fields go."""
    card = QFrame()
    card.setObjectName("card")
    layout = QVBoxLayout(card)
    layout.setContentsMargins(lines(1), lines(0.9), lines(1), lines(0.9))
    layout.setSpacing(lines(0.45))
    heading, explanation = QLabel(title), QLabel(words)
    heading.setObjectName("title")
    explanation.setObjectName("muted")
    explanation.setWordWrap(True)
    layout.addWidget(heading)
    layout.addWidget(explanation)
    return card, layout
