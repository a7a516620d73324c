"""The page of a conversation: header, messages, strips and composer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt, QTimer, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from moa_chat import strings
from moa_chat.desktop.appearance import COLUMN_LETTERS, Appearance, letters
from moa_chat.desktop.composer import Composer
from moa_chat.desktop.conversation_view import ConversationView
from moa_chat.desktop.find_bar import FindBar
from moa_chat.desktop.notices import DisagreementBanner, Legend, Notice, ProgressStrip
from moa_chat.desktop.stats_panel import RoundPlot
from moa_chat.desktop.widgets import IconButton, PlainLabel, add, centered, pad
from moa_runtime.events import LinkChanged, LinkStatus

_SLOW_SECONDS = 1.0  # a round trip from which the link is called slow
_COUNTDOWN_MS = 500  # of the badge
#: Parts of the context from which its meter is shown, and from which it warns.
_QUIET_BELOW, _FULL_FROM = 0.5, 0.85
_TITLE_LETTERS = 14  # of the title, which have room before the buttons' words do


class StatusBadge(PlainLabel):
    """A badge such as "online" or "reconnecting in 5 s"; the tooltip has the server and the reason."""

    resized = Signal()  # it has other words

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._appearance = appearance
        self._link: LinkChanged | None = None
        self._retry_at: float | None = None
        self._round_trip_s = 0.0
        self._server = ""
        self._wanted_offline = False
        self.setObjectName("pill")
        self.setAccessibleName(strings.CONNECTION)
        self._clock = QTimer(self)
        self._clock.timeout.connect(self._show)
        appearance.changed.connect(self._show)
        self._show()

    def set_server(self, server: str) -> None:
        """Set the verifier's name for the tooltip; empty while there is no connection."""
        self._server, self._link = server, None
        self._show()

    def set_link(self, link: LinkChanged) -> None:
        self._link = link
        self._retry_at = None if link.retry_in_s is None else time.monotonic() + link.retry_in_s
        self._clock.start(_COUNTDOWN_MS) if self._retry_at is not None else self._clock.stop()
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
        if self.text() != (shown := f"●  {words}"):
            self.setText(shown)
            self.resized.emit()
        self.setStyleSheet(f"color: {color}")
        self.setAccessibleDescription(words)
        why = self._link.detail if self._link else ""
        self.setToolTip("\n".join(part for part in (self._server, why) if part))

    def _state(self) -> tuple[str, str]:
        """Return words and colour of the state."""
        link, theme = self._link, self._appearance.theme
        if link is None:
            return strings.CONNECTING_STATE if self._server else strings.NOT_CONNECTED, theme.warning
        left = None if self._retry_at is None else self._retry_at - time.monotonic()
        slow = self._round_trip_s > _SLOW_SECONDS
        words = strings.link_words(link, left, wanted_offline=self._wanted_offline, slow=slow)
        if self._wanted_offline or link.late or (slow and link.status is LinkStatus.ONLINE):
            return words, theme.warning
        return words, theme.of_link(link.status)


class ContextMeter(PlainLabel):
    """Shows how full the target's context is, from one half on, and warns before it is full."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._appearance = appearance
        self._used = self._limit = 0
        self.setObjectName("figures")
        self.setAccessibleName(strings.CONTEXT)
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
        warns = full >= _FULL_FROM
        self.setText((strings.CONTEXT_FULL if warns else strings.CONTEXT_FILLED).format(int(100 * full)))
        self.setStyleSheet(f"color: {self._appearance.theme.warning}" if warns else "")
        says = strings.CONTEXT_TOKENS.format(self._used, self._limit)
        self.setToolTip(says)
        self.setAccessibleDescription(says)
        self.setVisible(full >= _QUIET_BELOW)


class Title(PlainLabel):
    """A line that shrinks before the buttons do and ends in an ellipsis then; the tooltip has all of it.

    Args:
        says: its name for screen readers, with braces for the text.
        style: see ``style.qss``.
    """

    def __init__(self, text: str, says: str = strings.TITLE, style: str = "title") -> None:
        self._says = says  # the base class sets a text
        super().__init__()
        self.setObjectName(style)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.setText(text)

    @property
    def shown(self) -> str:
        """The visible part of the text."""
        mode = Qt.TextElideMode.ElideRight
        return self.fontMetrics().elidedText(self.text(), mode, self.contentsRect().width())

    def setText(self, text: str) -> None:
        super().setText(text)
        self.setToolTip(text)
        self.setAccessibleName(self._says.format(text))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        place, aligned = self.contentsRect(), self.alignment()
        role, enabled = self.foregroundRole(), self.isEnabled()
        self.style().drawItemText(QPainter(self), place, aligned, self.palette(), enabled, self.shown, role)


class Header(QWidget):
    """The row above the conversation; the words of its ``buttons`` are hidden if there is no room."""

    def __init__(
        self,
        appearance: Appearance,
        sidebar: IconButton,
        titles: Sequence[Title],
        pill: StatusBadge,
        buttons: Sequence[IconButton],
    ) -> None:
        super().__init__()
        self.setObjectName("header")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._buttons = buttons
        row = self._row = QHBoxLayout(self)
        row.addWidget(sidebar)
        column = QVBoxLayout()
        pad(column, 0, spacing=0)
        add(column, *titles)
        row.addLayout(column, 1)
        add(row, pill, *buttons)
        appearance.changed.connect(self._fit)
        pill.resized.connect(self._fit)  # or a longer state would take the title's room
        self._fit()

    def minimumSizeHint(self) -> QSize:
        """Return the size without the buttons' words, which a narrow window hides."""
        hint = super().minimumSizeHint()
        words = sum(button.sizeHint().width() - button.width_without_word() for button in self._buttons)
        return QSize(hint.width() - words, hint.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        pad(self._row, 0.6, 0.4, 0.6, 0.4)
        for button in self._buttons:
            button.show_word(True)
        needed = self._row.minimumSize().width() + letters(_TITLE_LETTERS)
        for button in self._buttons:
            button.show_word(needed <= self.width())


class ChatPage(QWidget):
    """Header, conversation, strips and composer in their layout; the window connects their signals."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self.setObjectName("main")

        def button(icon: str, word: str, says: str, shortcut: str, *, toggles: bool = False) -> IconButton:
            made = IconButton(appearance, icon, says, shortcut=shortcut, word=word)
            made.setCheckable(toggles)
            return made

        self.sidebar = button("sidebar", "", strings.COMMAND_SIDEBAR, "Ctrl+B")
        self.title = Title(strings.NEW_CHAT)
        self.model = Title("", strings.MODEL, "figures")
        self.pill = StatusBadge(appearance)
        self.offline = button("offline", strings.OFFLINE, strings.COMMAND_OFFLINE, "Ctrl+Shift+O", toggles=True)
        self.origins = button("origins", strings.COLOURS, strings.COMMAND_ORIGINS, "Ctrl+Shift+G", toggles=True)
        self.plot_button = button("plot", strings.FIGURES, strings.COMMAND_FIGURES, "Ctrl+Shift+P", toggles=True)
        self.chat_settings = button("chat-settings", strings.CHAT_SETTINGS, strings.CHAT_SETTINGS, "Ctrl+Shift+S")
        self.export = button("export", strings.SAVE, strings.COMMAND_SAVE, "Ctrl+S")
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
        self._strips = QVBoxLayout(self._column)
        strips = (self.progress, self.notice, self.disagreement, self.legend, self.composer, self.context)
        add(self._strips, *strips)
        self._centered = centered(self._column)
        layout = QVBoxLayout(self)
        pad(layout, 0, spacing=0)
        buttons = (self.offline, self.origins, self.plot_button, self.chat_settings, self.export)
        add(layout, Header(appearance, self.sidebar, (self.title, self.model), self.pill, buttons), self.find)
        layout.addWidget(self.conversation, 1)
        layout.addLayout(self._centered)
        layout.addWidget(self.plot)
        self.plot_button.toggled.connect(self.plot.setVisible)
        self.conversation.verticalScrollBar().rangeChanged.connect(lambda _, most: self._line_up(most > 0))
        appearance.changed.connect(self._fit)
        self._fit()

    def _fit(self) -> None:
        self._column.setMaximumWidth(letters(COLUMN_LETTERS))
        pad(self._strips, 1.2, 0, 1.2, 0.5, spacing=0.4)

    def _line_up(self, scrolls: bool) -> None:
        """Keep the composer below the conversation's column, which the scroll bar moves."""
        bar = self.conversation.verticalScrollBar()
        self._centered.setContentsMargins(0, 0, bar.sizeHint().width() if scrolls else 0, 0)
