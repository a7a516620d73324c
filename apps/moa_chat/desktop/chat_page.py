"""The conversation with everything around it."""

from __future__ import annotations

from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.buttons import IconButton
from moa_chat.desktop.composer import Composer
from moa_chat.desktop.context_meter import ContextMeter
from moa_chat.desktop.conversation_view import ConversationView
from moa_chat.desktop.find_bar import FindBar
from moa_chat.desktop.header import Header, Title
from moa_chat.desktop.notices import DisagreementBanner, Legend, Notice
from moa_chat.desktop.plot import RoundPlot
from moa_chat.desktop.progress import ProgressStrip
from moa_chat.desktop.status_badge import ConnectionPill
from moa_chat.desktop.style import COLUMN_LETTERS, letters, lines


class ChatPage(QWidget):
    """Header, conversation, strips and composer, laid out; the window connects them."""

    def __init__(self, look: Look, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("main")
        self.sidebar = IconButton(look, "sidebar", "Show or hide the chats", shortcut="Ctrl+B")
        self.title = Title("New chat")
        self.pill = ConnectionPill(look)
        self.offline = _toggle(look, "offline", "Offline", "Work offline", "Ctrl+Shift+O")
        self.origins = _toggle(look, "origins", "Origins", "Colour the text by origin", "Ctrl+Shift+G")
        self.plot_button = _toggle(look, "plot", "Figures", "Show how the answer is made, in figures", "Ctrl+Shift+P")
        self.chat_settings = IconButton(
            look, "chat-settings", "Chat settings", shortcut="Ctrl+Shift+S", label="Chat settings"
        )
        self.export = IconButton(look, "export", "Save this chat as a file", shortcut="Ctrl+S", label="Save")
        self.conversation = ConversationView(look)
        self.find = FindBar(look, self.conversation)
        self.plot = RoundPlot(look)
        self.plot.hide()
        self.notice = Notice(look)
        self.progress = ProgressStrip()
        self.context = ContextMeter(look)
        self.disagreement = DisagreementBanner()
        self.legend = Legend(look)
        self.composer = Composer(look)
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
        layout.addWidget(Header(look, self.sidebar, self.title, self.pill, buttons))
        layout.addWidget(self.find)
        layout.addWidget(self.conversation, 1)
        layout.addLayout(centered)
        layout.addWidget(self.plot)
        self.plot_button.toggled.connect(self.plot.setVisible)
        self.conversation.verticalScrollBar().rangeChanged.connect(lambda _, most: self._line_up(most > 0))
        look.changed.connect(self._fit)
        self._fit()

    def _fit(self) -> None:
        self._column.setMaximumWidth(letters(COLUMN_LETTERS))
        self._strips.setContentsMargins(lines(1.2), 0, lines(1.2), lines(0.5))
        self._strips.setSpacing(lines(0.4))

    def _line_up(self, scrolls: bool) -> None:
        """Keep the composer below the conversation's column, which the scroll bar moves."""
        bar = self.conversation.verticalScrollBar()
        self._centered.setContentsMargins(0, 0, bar.sizeHint().width() if scrolls else 0, 0)


def _toggle(look: Look, name: str, label: str, says: str, shortcut: str) -> IconButton:
    button = IconButton(look, name, says, shortcut=shortcut, label=label)
    button.setCheckable(True)
    return button
