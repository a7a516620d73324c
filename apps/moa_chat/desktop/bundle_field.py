"""Which bundle is used; the default one can be made here."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QLabel, QProgressBar, QPushButton, QVBoxLayout, QWidget

from moa_chat.desktop.connector import Connector
from moa_chat.desktop.style import lines
from moa_runtime.errors import MoaError


class BundleField(QWidget):
    """The bundle in the cache, or in a folder of the user's.

    Attributes:
        folder: empty for the one in the cache.

    Signals:
        changed: there is another bundle now, or one at last.
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
        """Whether there is a bundle to use; whether it is whole is seen when it is opened."""
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
