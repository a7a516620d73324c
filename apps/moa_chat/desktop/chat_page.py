"""The page of a conversation: header, messages, strips and composer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import COLUMN_LETTERS, Appearance, letters, lines
from moa_chat.desktop.composer import Composer
from moa_chat.desktop.conversation_view import ConversationView
from moa_chat.desktop.find_bar import FindBar
from moa_chat.desktop.notices import DisagreementBanner, Legend, Notice
from moa_chat.desktop.stats_panel import RoundPlot
from moa_chat.desktop.widgets import IconButton
from moa_chat.strings import is_late, link_words
from moa_runtime.events import LinkChanged, LinkStatus

_SLOW_SECONDS = 1.0
_BADGE_MS = 500  # of the badge's countdown


class StatusBadge(QLabel):
    """A badge such as "online" or "reconnecting in 5 s"; the tooltip has the reason."""

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._appearance = appearance
        self._link: LinkChanged | None = None
        self._retry_at: float | None = None
        self._round_trip_s = 0.0
        self._server = ""
        self._wanted_offline = False
        self.setObjectName("pill")
        self.setAccessibleName("Connection")
        self._clock = QTimer(self)
        self._clock.timeout.connect(self._show)
        appearance.changed.connect(self._show)
        self._show()

    def set_server(self, server: str) -> None:
        """Set the verifier's name for the tooltip; empty while there is no connection."""
        self._server = server
        self._link = None
        self._show()

    def set_link(self, link: LinkChanged) -> None:
        self._link = link
        self._retry_at = None if link.retry_in_s is None else time.monotonic() + link.retry_in_s
        self._clock.start(_BADGE_MS) if self._retry_at is not None else self._clock.stop()
        self._show()

    def set_wanted_offline(self, offline: bool) -> None:
        """The user works without the server on purpose."""
        self._wanted_offline = offline
        self._show()

    def set_round_trip(self, seconds: float) -> None:
        """Set the duration of a round of drafting and verifying, seconds."""
        self._round_trip_s = seconds
        self._show()

    def _show(self) -> None:
        words, color = self._state()
        self.setText(f"●  {words}")
        self.setStyleSheet(f"color: {color}")
        self.setAccessibleDescription(words)
        why = self._link.detail if self._link else ""
        self.setToolTip("\n".join(part for part in (self._server, why) if part))

    def _state(self) -> tuple[str, str]:
        """Return words and colour of the state."""
        link, theme = self._link, self._appearance.theme
        if link is None:
            return ("connecting" if self._server else "not connected"), theme.warning
        left = None if self._retry_at is None else self._retry_at - time.monotonic()
        slow = self._round_trip_s > _SLOW_SECONDS
        words = link_words(link, left, wanted_offline=self._wanted_offline, slow=slow)
        if self._wanted_offline or is_late(link) or (slow and link.status is LinkStatus.ONLINE):
            return words, theme.warning
        return words, theme.of_link(link.status)


#: Parts of the context from which its meter is shown, and from which it warns.
_QUIET_BELOW, _FULL_FROM = 0.5, 0.85
_TICK_MS = 1000  # of the progress strip's clock
_TITLE_LETTERS = 14  # of the title, which have room before the buttons' words do


class ContextMeter(QLabel):
    """Shows how full the target's context is, from one half on, and warns before it is full."""

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._appearance = appearance
        self._used = self._limit = 0
        self.setObjectName("figures")
        self.setAccessibleName("Context of the model")
        self.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.setWordWrap(True)
        appearance.changed.connect(self._show)
        self._show()

    def show_use(self, used: int, limit: int) -> None:
        """Show that ``used`` of ``limit`` tokens are taken; ``limit`` is 0 if it is not known."""
        self._used, self._limit = used, limit
        self._show()

    def _show(self) -> None:
        full = min(self._used / self._limit, 1.0) if self._limit else 0.0
        percent = int(100 * full)
        words = f"Context {percent} % full"
        if full >= _FULL_FROM:
            words = f"The conversation fills {percent} % of what the model can read: begin a new chat soon"
        self.setText(words)
        self.setStyleSheet(f"color: {self._appearance.theme.warning}" if full >= _FULL_FROM else "")
        says = f"{self._used:,} of {self._limit:,} tokens (pieces of words) that the model can read are taken."
        self.setToolTip(says)
        self.setAccessibleDescription(says)
        self.setVisible(full >= _QUIET_BELOW)


class ProgressStrip(QFrame):
    """A sentence with the seconds so far, a bar of unknown length, and Cancel."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("banner")
        self._words, self._begun = "", 0.0
        self._cancel: Callable[[], None] = lambda: None
        self._text = QLabel()
        self._text.setWordWrap(True)
        self._text.setAccessibleName("Progress")
        bar = QProgressBar()
        bar.setRange(0, 0)
        bar.setTextVisible(False)
        bar.setAccessibleName("In progress")
        self.button = QPushButton("Cancel")
        self.button.clicked.connect(lambda: self._cancel())
        inside = QVBoxLayout()
        inside.addWidget(self._text)
        inside.addWidget(bar)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(lines(0.8), lines(0.5), lines(0.6), lines(0.5))
        layout.setSpacing(lines(0.8))
        layout.addLayout(inside, 1)
        layout.addWidget(self.button)
        self._clock = QTimer(self)
        self._clock.timeout.connect(self._show)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def begin(self, words: str, cancel: Callable[[], None]) -> None:
        """Show that something is under way, until :meth:`end`."""
        self._words, self._cancel, self._begun = words, cancel, time.monotonic()
        self._clock.start(_TICK_MS)
        self._show()
        self.show()

    def end(self) -> None:
        self._clock.stop()
        self.hide()

    def _show(self) -> None:
        self._text.setText(f"{self._words} ({time.monotonic() - self._begun:.0f} s)")


class Title(QLabel):
    """A line that shrinks before the buttons do. Text without room becomes an ellipsis; the tooltip and the name for
    screen readers have all of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.setObjectName("title")
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.setText(text)

    @property
    def shown(self) -> str:
        """The visible part of the text."""
        mode = Qt.TextElideMode.ElideRight
        return self.fontMetrics().elidedText(self.text(), mode, self.contentsRect().width())

    def setText(self, text: str) -> None:
        super().setText(text)
        self.setToolTip(f"<p>{escape(text)}</p>")  # or what looks like HTML in it would be shown as such
        self.setAccessibleName(f"Title of the chat: {text}")

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        place, aligned = self.contentsRect(), self.alignment()
        role, enabled = self.foregroundRole(), self.isEnabled()
        self.style().drawItemText(QPainter(self), place, aligned, self.palette(), enabled, self.shown, role)


class Header(QWidget):
    """The row above the conversation.

    Args:
        buttons: at the right; their words are hidden if there is no room.
    """

    def __init__(
        self,
        appearance: Appearance,
        sidebar: IconButton,
        title: Title,
        pill: QLabel,
        buttons: Sequence[IconButton],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.setObjectName("header")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._pill, self._buttons = pill, buttons
        row = self._row = QHBoxLayout(self)
        row.addWidget(sidebar)
        row.addWidget(title, 1)
        row.addWidget(pill)
        for button in buttons:
            row.addWidget(button)
        appearance.changed.connect(self._fit)
        self._fit()

    def minimumSizeHint(self) -> QSize:
        """Return the size without the buttons' words, which a narrow window hides."""
        hint = super().minimumSizeHint()
        words = sum(button.sizeHint().width() - button.width_without_label() for button in self._buttons)
        return QSize(hint.width() - words, hint.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        self._row.setContentsMargins(lines(0.6), lines(0.4), lines(0.6), lines(0.4))
        for button in self._buttons:
            button.show_label(True)
        needed = self._row.minimumSize().width() + letters(_TITLE_LETTERS)
        for button in self._buttons:
            button.show_label(needed <= self.width())


class ChatPage(QWidget):
    """Header, conversation, strips and composer in their layout; the window connects their signals."""

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("main")
        self.sidebar = IconButton(appearance, "sidebar", "Show or hide the chats", shortcut="Ctrl+B")
        self.title = Title("New chat")
        self.pill = StatusBadge(appearance)
        self.offline = _toggle(appearance, "offline", "Offline", "Work offline", "Ctrl+Shift+O")
        self.origins = _toggle(appearance, "origins", "Origins", "Colour the text by origin", "Ctrl+Shift+G")
        self.plot_button = _toggle(
            appearance, "plot", "Figures", "Show how the answer is made, in figures", "Ctrl+Shift+P"
        )
        self.chat_settings = IconButton(
            appearance, "chat-settings", "Chat settings", shortcut="Ctrl+Shift+S", label="Chat settings"
        )
        self.export = IconButton(appearance, "export", "Save this chat as a file", shortcut="Ctrl+S", label="Save")
        self.conversation = ConversationView(appearance)
        self.find = FindBar(appearance, self.conversation)
        self.plot = RoundPlot(appearance)
        self.plot.hide()
        self.notice = Notice(appearance)
        self.progress = ProgressStrip()
        self.context = ContextMeter(appearance)
        self.disagreement = DisagreementBanner()
        self.legend = Legend(appearance)
        self.composer = Composer(appearance)
        self._column = QWidget()
        column = self._strips = QVBoxLayout(self._column)
        for widget in (self.progress, self.notice, self.disagreement, self.legend, self.composer, self.context):
            column.addWidget(widget)
        centered = self._centered = QHBoxLayout()
        centered.addStretch(1)
        centered.addWidget(self._column, 100)
        centered.addStretch(1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        buttons = (self.offline, self.origins, self.plot_button, self.chat_settings, self.export)
        layout.addWidget(Header(appearance, self.sidebar, self.title, self.pill, buttons))
        layout.addWidget(self.find)
        layout.addWidget(self.conversation, 1)
        layout.addLayout(centered)
        layout.addWidget(self.plot)
        self.plot_button.toggled.connect(self.plot.setVisible)
        self.conversation.verticalScrollBar().rangeChanged.connect(lambda _, most: self._line_up(most > 0))
        appearance.changed.connect(self._fit)
        self._fit()

    def _fit(self) -> None:
        self._column.setMaximumWidth(letters(COLUMN_LETTERS))
        self._strips.setContentsMargins(lines(1.2), 0, lines(1.2), lines(0.5))
        self._strips.setSpacing(lines(0.4))

    def _line_up(self, scrolls: bool) -> None:
        """Keep the composer below the conversation's column, which the scroll bar moves."""
        bar = self.conversation.verticalScrollBar()
        self._centered.setContentsMargins(0, 0, bar.sizeHint().width() if scrolls else 0, 0)


def _toggle(appearance: Appearance, name: str, label: str, says: str, shortcut: str) -> IconButton:
    button = IconButton(appearance, name, says, shortcut=shortcut, label=label)
    button.setCheckable(True)
    return button
