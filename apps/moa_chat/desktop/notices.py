"""The strips around the composer: legend, notices, and a disagreement for the user to decide."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QCheckBox, QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Appearance, lines
from moa_chat.desktop.widgets import IconButton
from moa_chat.strings import DROPPED, ORIGINS, TENTATIVE, excerpt
from moa_runtime.events import Disagreement

_NOTICE_MS = 9000
_QUOTED = 90  # characters of each version


class Legend(QLabel):
    """The legend of the text's colours."""

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._appearance = appearance
        self.setObjectName("figures")
        self.setAccessibleName("Colours of the text")
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setWordWrap(True)
        appearance.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        theme = self._appearance.theme
        entries = [f'<span style="color:{theme.of_origin(origin)}">● {name}</span>' for origin, name in ORIGINS.items()]
        entries.append(f'<s style="color:{theme.dropped}">{DROPPED}</s>')
        entries.append(f"··· {TENTATIVE}")
        self.setText("&nbsp;&nbsp;&nbsp; ".join(entries))
        self.setVisible(self._appearance.origins)


class Notice(QFrame):
    """A sentence that is hidden after a while, with an optional button."""

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("banner")
        self._does: Callable[[], None] = lambda: None
        self._until_asked = False
        self._text = QLabel()
        self._text.setWordWrap(True)
        self._text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._text.setAccessibleName("Notice")
        self.button = QPushButton("Undo")
        self.button.clicked.connect(self._act)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(lines(0.8), lines(0.4), lines(0.4), lines(0.4))
        layout.addWidget(self._text, 1)
        layout.addWidget(self.button)
        layout.addWidget(IconButton(appearance, "close", "Close this notice", self.hide))
        self._clock = QTimer(self)
        self._clock.setSingleShot(True)
        self._clock.timeout.connect(self.hide)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def say(
        self,
        text: str,
        offer: str = "",
        does: Callable[[], None] = lambda: None,
        *,
        stays: bool = False,
        until_asked: bool = False,
    ) -> None:
        """Show a sentence.

        Args:
            offer: the button's text; none without it.
            does: what the button does.
            stays: until it is closed; for what must not be missed.
            until_asked: until it is closed, or :meth:`asked` is called.
        """
        self._until_asked = until_asked
        self._text.setText(text)
        self.button.setText(offer)
        self.button.setVisible(bool(offer))
        self._does = does
        self.show()
        self._clock.stop() if stays or until_asked else self._clock.start(_NOTICE_MS)

    def asked(self) -> None:
        """Hide a notice that stays only until the user asks something."""
        if self._until_asked:
            self.hide()

    def _act(self) -> None:
        self.hide()
        self._does()


class DisagreementBanner(QFrame):
    """Asks the user to decide between the server's text and the text that the device wrote offline.

    Signals:
        chosen: whether to keep the device's version, and whether to do so every time.
    """

    chosen = Signal(bool, bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("banner")
        title = QLabel("The server disagrees from here")
        title.setObjectName("title")
        self.versions = QLabel()
        self.versions.setWordWrap(True)
        self.versions.setTextFormat(Qt.TextFormat.PlainText)
        self.versions.setAccessibleName("Both versions")
        self.always = QCheckBox("Always do this")
        self.theirs = QPushButton("Use the server's version")
        self.theirs.setObjectName("primary")
        self.mine = QPushButton("Keep mine")
        self.theirs.clicked.connect(lambda: self._choose(False))
        self.mine.clicked.connect(lambda: self._choose(True))
        row = QHBoxLayout()
        row.addWidget(self.always, 1)
        row.addWidget(self.mine)
        row.addWidget(self.theirs)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(lines(0.8), lines(0.6), lines(0.8), lines(0.6))
        layout.addWidget(title)
        layout.addWidget(self.versions)
        layout.addLayout(row)
        self.hide()

    def ask(self, disagreement: Disagreement) -> None:
        """Show both versions; meanwhile the answer continues with the server's."""
        mine, theirs = (excerpt(text, _QUOTED) for text in (disagreement.dropped_text, disagreement.replacement_text))
        self.versions.setText(f"Mine: “{mine}”\nServer: “{theirs}”")
        self.always.setChecked(False)
        self.show()

    def _choose(self, mine: bool) -> None:
        self.hide()
        self.chosen.emit(mine, self.always.isChecked())
