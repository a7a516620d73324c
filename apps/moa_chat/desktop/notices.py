"""The strips around the composer: legend, notices, progress, and a disagreement for the user to decide."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QVBoxLayout

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance
from moa_chat.desktop.widgets import CheckBox, IconButton, add, label, pad, push_button
from moa_runtime.events import Disagreement

_NOTICE_MS = 9000
_TICK_MS = 1000  # of the clock of a progress strip
_QUOTED = 90  # characters of each version


class Legend(QLabel):
    """The legend of the text's colours."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._appearance = appearance
        self.setObjectName("figures")
        self.setAccessibleName(strings.LEGEND)
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setWordWrap(True)
        appearance.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        theme = self._appearance.theme
        entries = [
            f'<span style="color:{theme.of_origin(origin)}">● {name}</span>' for origin, name in strings.ORIGINS.items()
        ]
        entries.append(f'<s style="color:{theme.dropped}">{strings.DROPPED}</s>')
        entries.append(f"··· {strings.TENTATIVE}")
        self.setText("&nbsp;&nbsp;&nbsp; ".join(entries))
        self.setVisible(self._appearance.origins)


class Notice(QFrame):
    """A sentence that is hidden after a while, with an optional button."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self.setObjectName("banner")
        self._does: Callable[[], None] = lambda: None
        self._until_asked = False
        self._text = label(says=strings.NOTICE, selectable=True)
        self.button = push_button(strings.UNDO, self._act)
        layout = QHBoxLayout(self)
        pad(layout, 0.8, 0.4, 0.4, 0.4)
        layout.addWidget(self._text, 1)
        add(layout, self.button, IconButton(appearance, "close", strings.CLOSE_NOTICE, self.hide))
        self._clock = QTimer(self, singleShot=True, timeout=self.hide)
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
        """Show a sentence and, with ``offer``, a button: for a while, until it is closed (``stays``), or until
        :meth:`asked` is called (``until_asked``)."""
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


class ProgressStrip(QFrame):
    """A sentence with the seconds so far, a bar, and Cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("banner")
        self._words, self._begun = "", 0.0
        self._cancel: Callable[[], None] = lambda: None
        self._text = label(says=strings.PROGRESS)
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(strings.IN_PROGRESS)
        self.button = push_button(strings.CANCEL, lambda: self._cancel())
        inside = QVBoxLayout()
        add(inside, self._text, self.bar)
        layout = QHBoxLayout(self)
        pad(layout, 0.8, 0.5, 0.6, 0.5, spacing=0.8)
        layout.addLayout(inside, 1)
        layout.addWidget(self.button)
        self._clock = QTimer(self)
        self._clock.timeout.connect(self._show)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def begin(self, words: str, cancel: Callable[[], None], part: float | None = None) -> None:
        """Show that something is under way, or in other words that it still is, until :meth:`end`; ``part`` of it is
        done, from 0 to 1, if that is known."""
        self.bar.setRange(0, 0 if part is None else 100)
        self.bar.setValue(0 if part is None else round(100 * part))
        self._begun = time.monotonic() if self.isHidden() else self._begun
        self._words, self._cancel = words, cancel
        self._clock.start(_TICK_MS)
        self._show()
        self.show()

    def end(self) -> None:
        self._clock.stop()
        self.hide()

    def _show(self) -> None:
        self._text.setText(strings.SECONDS.format(self._words, time.monotonic() - self._begun))


class DisagreementBanner(QFrame):
    """Asks the user to decide between the server's text and the text that the device wrote offline."""

    chosen = Signal(bool, bool)  # whether to keep the device's version, and whether to do so every time

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("banner")
        self.versions = label(says=strings.BOTH_VERSIONS)
        self.always = CheckBox(strings.ALWAYS)
        self.theirs = push_button(strings.USE_THEIRS, lambda: self._choose(False), style="primary")
        self.mine = push_button(strings.KEEP_MINE, lambda: self._choose(True))
        row = QHBoxLayout()
        row.addWidget(self.always, 1)
        add(row, self.mine, self.theirs)
        layout = QVBoxLayout(self)
        pad(layout, 0.8, 0.6, 0.8, 0.6)
        add(layout, label(strings.DISAGREES, "title", wraps=False), self.versions)
        layout.addLayout(row)
        self.hide()

    def ask(self, disagreement: Disagreement) -> None:
        """Show both versions; meanwhile the answer continues with the server's."""
        mine, theirs = disagreement.dropped_text, disagreement.replacement_text
        texts = strings.excerpt(mine, _QUOTED), strings.excerpt(theirs, _QUOTED)
        self.versions.setText(strings.VERSIONS.format(*texts))
        self.always.setChecked(False)
        self.show()

    def _choose(self, mine: bool) -> None:
        self.hide()
        self.chosen.emit(mine, self.always.isChecked())
