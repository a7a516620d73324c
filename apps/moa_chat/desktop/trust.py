"""A certificate that no authority vouches for, and the question whether to trust it."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QLabel, QPushButton, QVBoxLayout, QWidget

from moa_chat.desktop.certificates import Certificate
from moa_chat.desktop.style import lines


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
        # A break opportunity at each byte, or the label would be as wide as the whole.
        self.fingerprint.setText(certificate.fingerprint.replace(":", ":\N{ZERO WIDTH SPACE}"))
        self.show()

    def _trust(self) -> None:
        self.hide()
        if self._certificate is not None:
            self.trusted.emit(self._certificate.pem)
