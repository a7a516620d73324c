"""A verifier, and if need be a bundle, made on this machine: for ``moa-chat --local`` and for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO
from urllib.parse import urlsplit

from moa_chat import strings
from moa_export.progress import Progress
from moa_runtime.bundle import make_bundle
from moa_runtime.cli_main import own_program
from moa_runtime.errors import MoaError
from moa_runtime.manifest import MANIFEST_FILE, Manifest
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DEFAULT_DRAFTER, DrafterName
from moa_runtime.paths import bundle_of_drafter
from moa_runtime.transport import Endpoint

#: Options of ``moa-serve`` for a verifier of this machine: it ends with the program that holds its standard input open.
SERVE_HERE = ("--json", "--port", "0", "--until-stdin-ends")

_START_SECONDS = 600.0  # the first start fetches the target
_STOP_SECONDS = 5.0
#: A verifier that ends sooner after it was ready is not started again: it would end again.
_LEAST_SECONDS = 20.0


class LocalVerifier:
    """A verifier on a free port of this machine, which is being started: :meth:`wait` has to be called once.

    Args:
        options: of ``moa-serve``.
        cpus: processors that it may use; None for all.
        token: that clients have to send.
        restarts: whether it is started again if it ends by itself.

    Attributes:
        endpoint: where it listens, also after another start; set by :meth:`wait`.
        problem: the error with which it ended for good; None while it runs, and while it is started again.

    Raises:
        OSError: no program can be started.
    """

    endpoint: Endpoint

    def __init__(self, options: Sequence[str], cpus: set[int] | None, token: str, restarts: bool) -> None:
        self._options, self._cpus, self._token, self._restarts = options, cpus, token, restarts
        self._changing = threading.Lock()  # held while there is another process to come
        self._stopped = False
        self.problem: MoaError | None = None
        self._process, self._log = self._begun(SERVE_HERE)

    def wait(self) -> Endpoint:
        """Wait until it serves, its progress on stderr; return where. Raises MoaError if it does not start, as without
        the server's packages."""
        self.endpoint = Endpoint(_ready_url(self._process, self._log, shown=True), self._token)
        threading.Thread(target=self._keep, daemon=True).start()
        return self.endpoint

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End it."""
        self._stopped = True
        with self._changing:
            _stop(self._process)

    def _begun(self, serve: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """Start a process; return it with the file that gets its messages, which would end up between the answers."""
        log = tempfile.TemporaryFile()  # noqa: SIM115  open for as long as the process runs
        process = subprocess.Popen(
            own_program("moa_server.cli", *serve, *self._options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "MOA_TOKEN": self._token},
            # Ctrl-C in this terminal stops an answer, and must not reach the verifier.
            start_new_session=os.name == "posix",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        if self._cpus is not None:
            os.sched_setaffinity(process.pid, self._cpus)
        return process, log

    def _keep(self) -> None:
        """Wait until it ends by itself; start it again on the same port, unless it ended soon."""
        same_port = [str(urlsplit(self.endpoint.url).port) if option == "0" else option for option in SERVE_HERE]
        while True:
            ready = time.monotonic()
            self._process.wait()
            with self._changing:
                if self._stopped:
                    return
                ended = _ended("the server on this device ended", self._process, self._log)
                if not self._restarts or time.monotonic() - ready < _LEAST_SECONDS:
                    self.problem = ended
                    return
                self._process, self._log = self._begun(same_port)
            try:
                _ready_url(self._process, self._log, shown=False)  # an answer may be on the screen
            except MoaError as error:
                self.problem = None if self._stopped else error
                return


def ensure_bundle(drafter: DrafterName | None = None) -> None:
    """Make the bundle for a drafter if it is not there, progress on stderr. Raises MoaError if that fails."""
    folder = bundle_of_drafter(drafter)
    if not (folder / MANIFEST_FILE).exists():
        make_bundle(folder, "onnx", "--local (moa-serve)", drafter)


def serve_options(manifest: Manifest, model: str | None = None, drafter: str | None = None) -> tuple[str, ...]:
    """Return the options of ``moa-serve`` with which it serves a bundle's target and drafter.

    Args:
        model, drafter: as the user named them; by default as the bundle does, a shipped drafter by its fingerprint.

    Raises:
        MoaError: the bundle does not say where its target or drafter is.
    """
    from moa_drafter.config import drafter_fingerprint
    from moa_drafter.pretrained import shipped_checkpoint, shipped_names
    from moa_drafter.target_source import DEFAULT_TARGET, check_target

    target, wanted = model or manifest.target, manifest.fingerprints.drafter
    try:
        check_target(target)
    except MoaError as error:
        if model is not None:
            raise
        text = f"the bundle is for the target {target}, which is not found by this name: --model names its folder, file"
        raise MoaError(f"{text} or Hub id", code=error.code) from error
    if drafter is None and wanted:
        shipped = (name for name in shipped_names() if drafter_fingerprint(shipped_checkpoint(name)) == wanted)
        drafter = next(shipped, None)
        if drafter is None and manifest.has_rows:
            text = "the bundle's drafter is none of those that are shipped: give its folder with --drafter"
            raise MoaError(text, code="unknown_drafter")
    default = target == DEFAULT_TARGET
    served = () if default else ("--model", target)
    return served if drafter is None or (default and drafter == DEFAULT_DRAFTER) else (*served, "--drafter", drafter)


@contextlib.contextmanager
def local_verifier(
    options: Sequence[str] = (),
    *,
    cpus: set[int] | None = None,
    token: str | None = None,
    restarts: bool = False,
    waits: bool = True,
) -> Iterator[LocalVerifier]:
    """Run a :class:`LocalVerifier` while the context is open, with a token of its own unless one is given.

    Args:
        waits: whether it serves already; else the caller does something else before :meth:`LocalVerifier.wait`.
    """
    require_extra("server", "--local (moa-serve)")
    # With a token, because other users of this machine reach its port too.
    verifier = LocalVerifier(options, cpus, token or secrets.token_urlsafe(24), restarts)
    try:
        if waits:
            verifier.wait()
        yield verifier
    finally:
        verifier.stop()


def _ready_url(process: subprocess.Popen[bytes], log: IO[bytes], *, shown: bool) -> str:
    """Wait for the verifier's ready line, and return its URL; ``shown``: show on stderr what it does until then."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    until = time.monotonic() + _START_SECONDS
    progress = Progress(sys.stderr, quiet=not shown, program="moa-serve")
    with contextlib.ExitStack() as stage:
        stage.enter_context(progress.stage(strings.STARTING_LOCAL))
        while line := _next_line(lines, until):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if "url" in event:
                    return str(event["url"])
                title = str(event["stage"])  # each of one step, so that a line of JSON begins one
                stage.close()
                stage.enter_context(progress.stage(title))
    process.wait(_STOP_SECONDS)
    raise _ended("the server did not start", process, log)


def _next_line(lines: queue.SimpleQueue[bytes], until: float) -> bytes:
    try:
        return lines.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        raise MoaError(f"the server was not ready within {_START_SECONDS:g} s", code="timed_out") from None


def _ended(what: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> MoaError:
    log.seek(0)
    words, code = last_error(log.read(), process.returncode)
    return MoaError(f"{what}: {words}", code=code or "verifier_ended")


def last_error(stderr: bytes, status: int) -> tuple[str, str | None]:
    """Return the sentence of :func:`~moa_runtime.cli_main.run_program` and its code, or how the program ended: a
    negative ``status`` is a signal's, as in :mod:`subprocess`."""
    if status < 0:
        return f"it was ended by {_signal_name(-status)}", None
    lines = stderr.decode(errors="replace").strip().splitlines()
    found = re.fullmatch(r"(?:.*?error: )?(.*?)(?:  \[(\w+)\])?", lines[-1]) if lines else None
    return (found[1], found[2]) if found else (f"exit status {status}", None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # not one of this system's
        return f"signal {number}"


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Read to the end, also after the ready line, so that the pipe never fills up."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()  # not before: its end would reach the verifier sooner than the signal
