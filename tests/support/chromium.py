"""A headless Chromium with a page that does the jobs that a test gives it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from moa_runtime.errors import MoaError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SCRIPT = "text/javascript"
_TYPES = {".html": "text/html", ".js": _SCRIPT, ".mjs": _SCRIPT, ".wasm": "application/wasm"}
_SILENT_S = 300
_OPTIONS = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: a browser that ends resets its connections, and reports any other failure itself."""


class BrowserPage:
    """A page in the browser, open inside ``with``.

    The page fetches ``/next``, a JSON object each time, does it and posts the outcome to ``/said``; it ends with
    ``{"stop": true}``. All other requested paths are in ``asked``.

    Args:
        browser: the command of a Chromium; None for one that is installed, else MoaError is raised.
        folders: served folders by the beginning of their paths.
    """

    def __init__(
        self, browser: str | None, page: str, folders: Mapping[str, Path], options: Sequence[str] = ()
    ) -> None:
        found = browser or next(filter(shutil.which, BROWSERS), None)
        if found is None or shutil.which(found) is None:
            raise MoaError(
                f"no browser: {found or 'Chromium'} is not installed; name one with --browser", code="no_browser"
            )
        self._browser, self._page, self._folders, self._more = found, page, folders, options
        self._next: queue.Queue[dict[str, Any]] = queue.Queue()
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self.asked: list[str] = []

    def __enter__(self) -> BrowserPage:
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = [*_OPTIONS, *self._more, f"--user-data-dir={self._profile.name}"]
        if os.name == "posix" and os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium has none for root
        url = f"http://127.0.0.1:{self.port}{self._page}"
        self._process = subprocess.Popen(
            [self._browser, *options, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._next.put({"stop": True})
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._server.shutdown()
        self._server.server_close()
        self._profile.cleanup()

    @property
    def port(self) -> int:
        """Port of the server, which listens on 127.0.0.1."""
        return self._server.server_port

    def tell(self, todo: Mapping[str, Any]) -> None:
        """Give the page a job that it does not answer."""
        self._next.put(dict(todo))

    def ask(self, todo: Mapping[str, Any]) -> dict[str, Any]:
        """Give the page a job and return its answer. Raises MoaError if the job fails, or the browser ends."""
        self.tell(todo)
        for _ in range(_SILENT_S):
            try:
                said = self._said.get(timeout=1)
            except queue.Empty:
                if self._process.poll() is not None:
                    raise MoaError(
                        f"{self._browser} has ended ({self._process.returncode})", code="browser_ended"
                    ) from None
                continue
            if "error" in said:
                raise MoaError(f"the browser failed: {' '.join(str(said['error']).split())}", code="browser_failed")
            return said
        raise MoaError(f"the browser said nothing for {_SILENT_S} seconds", code="timeout")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/next":
                    self._reply(json.dumps(page._next.get()).encode(), "application/json")
                    return
                page.asked.append(self.path)
                path = page._path_of(self.path)
                if path is None or not path.is_file():
                    self.send_error(404)
                else:
                    self._reply(path.read_bytes(), _TYPES.get(path.suffix, "application/octet-stream"))

            def do_POST(self) -> None:
                page._said.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._reply(b"", "text/plain")

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

            def _reply(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

        return Handler

    def _path_of(self, path: str) -> Path | None:
        """Return the file at a requested path; None outside the served folders."""
        if ".." in path.split("/"):
            return None
        start = max(filter(path.startswith, self._folders), key=len, default=None)
        return None if start is None else self._folders[start] / path.removeprefix(start)
