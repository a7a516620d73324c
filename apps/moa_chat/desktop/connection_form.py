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
    QProgressBar,
    QPushButton,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from moa_chat.desktop.appearance import lines
from moa_chat.desktop.connection import Certificate, ConnectionFailedError, Connector, Trouble
from moa_chat.desktop.profile import Settings
from moa_runtime.errors import MoaError


class TrustQuestion(QFrame):
    """Shows a certificate's fingerprint and what it is good for.

    Signals:
        trusted: the certificate as PEM.
    """

    trusted = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("inner")
        self._certificate: Certificate | None = None
        words = QLabel(
            "The verifier signed its certificate itself. That is usual for a server of one's own, but it does not "
            "show who answers. Compare this fingerprint (SHA-256) with the one on the server:"
        )
        words.setWordWrap(True)
        self.fingerprint = QLabel()
        self.fingerprint.setWordWrap(True)
        self.fingerprint.setAccessibleName("Fingerprint of the certificate")
        self.fingerprint.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        how = QLabel("On the server: openssl x509 -noout -fingerprint -sha256 -in cert.pem")
        how.setObjectName("muted")
        how.setWordWrap(True)
        self.button = QPushButton("They are the same: trust this certificate")
        self.button.clicked.connect(self._trust)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(lines(0.8), lines(0.7), lines(0.8), lines(0.7))
        layout.setSpacing(lines(0.4))
        for widget in (words, self.fingerprint, how):
            layout.addWidget(widget)
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
    """The bundle in the cache, or in a folder that the user chose.

    Attributes:
        folder: empty for the bundle in the cache.

    Signals:
        changed: another bundle was chosen, or one was made.
    """

    changed = Signal()

    def __init__(self, connector: Connector, folder: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.folder = folder
        self._export = connector.export
        self._export.progressed.connect(self._progressed)
        self._export.ended.connect(self._ended)
        self.state = QLabel()
        self.state.setWordWrap(True)
        self.state.setAccessibleName("Bundle")
        self.make = QPushButton("Make it now")
        self.make.setAccessibleName("Export the default bundle")
        self.make.clicked.connect(self._start)
        self.choose = QPushButton("Choose a folder…")
        self.choose.clicked.connect(self._choose)
        self.default = QPushButton("Use the default one")
        self.default.clicked.connect(lambda: self._use(""))
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Progress of the export")
        buttons = QHBoxLayout()
        for button in (self.make, self.choose, self.default):
            buttons.addWidget(button)
        buttons.addStretch()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(lines(0.4))
        layout.addWidget(self.state)
        layout.addWidget(self.progress)
        layout.addLayout(buttons)
        self._show()

    @property
    def present(self) -> bool:
        """Whether there is a bundle; it is checked only when it is opened."""
        return bool(self.folder) or self._export.present

    def _show(self, problem: str = "") -> None:
        running, exported = self._export.running, self._export.present
        if problem:
            words = problem
        elif running:
            words = "Exporting…"
        elif self.folder:
            words = self.folder
        elif exported:
            words = "The default bundle is in the cache."
        else:
            words = "There is none yet. Making it takes about a minute."
        self.state.setObjectName("problem" if problem else "")
        self.state.style().polish(self.state)
        self.state.setText(words)
        self.make.setVisible(not running and not exported and not self.folder)
        self.choose.setEnabled(not running)
        self.default.setVisible(bool(self.folder))
        self.progress.setVisible(running)

    def _use(self, folder: str) -> None:
        self.folder = folder
        self._show()
        self.changed.emit()

    def _choose(self) -> None:
        if folder := QFileDialog.getExistingDirectory(self, "Folder of the bundle", self.folder):
            self._use(folder)

    def _start(self) -> None:
        try:
            self._export.start()
        except MoaError as error:
            self._show(str(error))
            return
        self.progress.setRange(0, 0)
        self._show()

    def _progressed(self, stage: str, part: float) -> None:
        # A stage of one step has no measure: the bar only shows that something is done.
        self.progress.setRange(0, 100 if part else 0)
        self.progress.setValue(round(100 * part))
        self.state.setText(stage[:1].upper() + stage[1:] + "…")

    def _ended(self, error: MoaError | None) -> None:
        self._show("" if error is None else str(error))
        self.changed.emit()


class ConnectionForm(QWidget):
    """Fields for the verifier's address, its token and certificate, and the bundle.

    Signals:
        changed: a field has another value.
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
        """Return the settings with the values of the form."""
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
        """Show the error, focus the field at fault, and offer to trust a certificate that is not trusted."""
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
            self._say(f"{name} is not a certificate in PEM format.", "problem")

    def trust_certificate(self, pem: str) -> None:
        """Trust only the certificate in this PEM text; an empty text restores the system's authorities."""
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
    """Return a frame with a heading, and the layout for its fields."""
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
