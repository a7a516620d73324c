"""Programs that the window starts: the verifier of this machine, and the export of a bundle."""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, Signal

from moa_chat.local_verifier import SERVE_HERE
from moa_runtime.bundle import MANIFEST_FILE
from moa_runtime.cli_main import own_program
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DrafterName, drafter_option
from moa_runtime.paths import bundle_of_drafter
from moa_runtime.transport import Endpoint

_STOP_MS = 3000


class Program(QObject):
    """A program of moa-edge that says what it does as JSON objects, one a line. Its standard input is a pipe that ends
    when this program does.

    Signals:
        said: one of the objects.
        ended: how: None after exit status 0, else a MoaError with the program's last words.
    """

    said = Signal(dict)
    ended = Signal(object)

    def __init__(self, command: list[str], environment: dict[str, str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._name = command[0]
        self._process = QProcess(self)
        self._process.setProgram(command[0])
        self._process.setArguments(command[1:])
        whole = QProcessEnvironment.systemEnvironment()
        for name, value in environment.items():
            whole.insert(name, value)
        self._process.setProcessEnvironment(whole)
        self._process.readyReadStandardOutput.connect(self._read)
        self._process.finished.connect(self._finished)
        self._process.errorOccurred.connect(self._not_started)

    @property
    def running(self) -> bool:
        return self._process.state() is not QProcess.ProcessState.NotRunning

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        """End it, by force if it does not listen."""
        self._process.finished.disconnect(self._finished)
        self._process.terminate()
        if not self._process.waitForFinished(_STOP_MS):
            self._process.kill()
            self._process.waitForFinished(_STOP_MS)

    def _read(self) -> None:
        while self._process.canReadLine():
            # Whatever else a library prints is not for us.
            with contextlib.suppress(ValueError):
                said = json.loads(bytes(self._process.readLine().data()))
                if isinstance(said, dict):
                    self.said.emit(said)

    def _finished(self, status: int, how: QProcess.ExitStatus) -> None:
        if status == 0 and how is QProcess.ExitStatus.NormalExit:
            self.ended.emit(None)
            return
        last = bytes(self._process.readAllStandardError().data()).decode(errors="replace").strip().splitlines()
        words = last[-1].partition("error: ")[2] or last[-1] if last else f"exit status {status}"
        self.ended.emit(MoaError(words))

    def _not_started(self, error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart:
            self.ended.emit(MoaError(f"{self._name} could not be started: {self._process.errorString()}"))


class VerifierProcess(QObject):
    """Runs ``moa-serve`` on a free port of this machine while the window is open.

    Args:
        drafter: that the window was started with; the verifier uses it too.

    Signals:
        ready: its :class:`~moa_runtime.transport.Endpoint`.
        failed: why there is none, or no longer one.
    """

    ready = Signal(object)
    failed = Signal(object)

    def __init__(self, drafter: DrafterName | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._options = drafter_option(drafter)
        self._token = secrets.token_urlsafe(24)  # other users of this machine reach its port too
        self._program: Program | None = None

    def start(self) -> None:
        """Start it, or start it again.

        Raises:
            MoaError: the server's packages are not installed.
        """
        require_extra("server", "A verifier on this machine")
        self.stop()
        command = own_program("moa_server.cli", *SERVE_HERE, *self._options)
        self._program = Program(command, {"MOA_TOKEN": self._token}, parent=self)
        self._program.said.connect(self._said)
        self._program.ended.connect(self._ended)
        self._program.start()

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()
            self._program = None

    def _said(self, said: dict[str, Any]) -> None:
        if "url" in said:
            self.ready.emit(Endpoint(said["url"], self._token))

    def _ended(self, error: MoaError | None) -> None:
        self._program = None
        self.failed.emit(MoaError(f"The verifier on this machine ended: {error or 'without a reason'}."))


class BundleExport(QObject):
    """The export of the bundle for a drafter.

    Args:
        drafter: that the window was started with; without one it is the default bundle.

    Attributes:
        folder: of the bundle.

    Signals:
        progressed: what is done now, and how much of it, from 0 to 1.
        ended: the bundle is there (None), or why not.
    """

    progressed = Signal(str, float)
    ended = Signal(object)

    def __init__(self, drafter: DrafterName | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder = bundle_of_drafter(drafter)
        self._options = drafter_option(drafter)
        self._program: Program | None = None

    @property
    def running(self) -> bool:
        return self._program is not None

    @property
    def present(self) -> bool:
        """Whether the bundle is there; it is checked only when it is opened."""
        return (self.folder / MANIFEST_FILE).is_file()

    def start(self) -> None:
        """Start the export.

        Raises:
            MoaError: the export's packages are not installed.
        """
        require_extra("export", "The export of a bundle")
        command = own_program("moa_chat.desktop.export_program", str(self.folder), *self._options)
        self._program = Program(command, {}, parent=self)
        self._program.said.connect(lambda said: self.progressed.emit(said["stage"], said["part"]))
        self._program.ended.connect(self._ended)
        self._program.start()

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()
            self._program = None

    def _ended(self, error: MoaError | None) -> None:
        self._program = None
        self.ended.emit(None if error is None else MoaError(f"The bundle could not be exported: {error}"))
