"""Programs that the window starts: the verifier of this machine, and the one that makes a bundle."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, Signal

from moa_chat import strings
from moa_chat.local_verifier import SERVE_HERE, last_error, serve_options
from moa_runtime.cli_main import own_program
from moa_runtime.errors import MoaError
from moa_runtime.manifest import MANIFEST_FILE, read_manifest
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DrafterName, drafter_option
from moa_runtime.paths import bundle_of_drafter
from moa_runtime.transport import Endpoint

_STOP_MS = 3000


class Program(QObject):
    """A program of moa-edge that prints JSON objects, one a line, and ends when its standard input does."""

    said = Signal(dict)  # one of the objects
    ended = Signal(object)  # how: None after exit status 0, else a MoaError with the program's last words

    def __init__(self, command: list[str], environment: dict[str, str], parent: QObject | None = None) -> None:
        super().__init__(parent)
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
        signalled = how is QProcess.ExitStatus.CrashExit  # then the status is the signal's number
        words, code = last_error(bytes(self._process.readAllStandardError().data()), -status if signalled else status)
        self.ended.emit(MoaError(words, code=code))

    def _not_started(self, error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart:
            text = f"{self._process.program()} could not be started: {self._process.errorString()}"
            self.ended.emit(MoaError(text, code="not_started"))


class _Runner(QObject):
    """Runs one program at a time, with the options for a drafter."""

    def __init__(self, drafter: DrafterName | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._options = drafter_option(drafter)
        self._program: Program | None = None

    @property
    def running(self) -> bool:
        return self._program is not None

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()
            self._program = None

    def _run(self, command: list[str], environment: dict[str, str], said: Callable[[dict[str, Any]], object]) -> None:
        self.stop()
        self._program = Program(command, environment, self)
        self._program.said.connect(said)
        self._program.ended.connect(self._ended)
        self._program.start()


class VerifierProcess(_Runner):
    """Runs ``moa-serve`` on a free port of this machine while the window is open, with the drafter of the window."""

    ready = Signal(object)  # its :class:`~moa_runtime.transport.Endpoint`
    failed = Signal(object)  # why there is none, or no longer one

    def start(self, bundle: Path | None = None) -> None:
        """Start it, or start it again, for a bundle. Raises MoaError if the server's packages are not installed."""
        require_extra("server", "A server on this device")
        token = secrets.token_urlsafe(24)  # other users of this machine reach its port too

        def said(event: dict[str, Any]) -> None:
            if "url" in event:
                self.ready.emit(Endpoint(event["url"], token))

        options = self._options
        if bundle is not None:
            with contextlib.suppress(MoaError):  # the verifier's greeting says what differs
                options = serve_options(read_manifest(bundle))
        self._run(own_program("moa_server.cli", *SERVE_HERE, *options), {"MOA_TOKEN": token}, said)

    def _ended(self, error: MoaError | None) -> None:
        self._program = None
        code = error.code if error is not None else None
        text = f"The server on this device ended: {error or 'it gave no reason'}."
        self.failed.emit(MoaError(text, code=code or "verifier_ended"))


class BundleExport(_Runner):
    """Makes the bundle for the window's drafter, the default bundle without one, in ``folder``."""

    progressed = Signal(str, float)  # what is done now, with what comes next, and how much of it, from 0 to 1
    ended = Signal(object)  # the bundle is there (None), or why not

    def __init__(self, drafter: DrafterName | None = None, parent: QObject | None = None) -> None:
        super().__init__(drafter, parent)
        self.folder = bundle_of_drafter(drafter)

    @property
    def present(self) -> bool:
        """Whether the bundle is there; it is checked only when it is opened."""
        return (self.folder / MANIFEST_FILE).is_file()

    def start(self) -> None:
        """Start it. Raises MoaError if packages are not installed."""
        require_extra("server", "A model on this device")
        command = own_program("moa_export.build_program", str(self.folder), "--json", *self._options)
        self._run(command, {}, lambda said: self.progressed.emit(strings.stage_words(said), said["part"]))

    def _ended(self, error: MoaError | None) -> None:
        self._program = None
        if error is not None:
            error = MoaError(f"The small model could not be made: {error}", code=error.code or "export_failed")
        self.ended.emit(error)
