"""Connections of web pages in a real browser."""

from __future__ import annotations

import contextlib
import http.server
import queue
import subprocess
import threading
from collections.abc import Iterator

import pytest

from integration.server.test_pages import ORIGINS, TOKEN, bearer, hello
from moa_server.settings import Settings
from support.server.running import serving
from support.toy_engine import ToyEngine


@pytest.fixture
def verifier():
    with serving(ToyEngine(), Settings(token=TOKEN, origins=tuple(ORIGINS[:1]))) as running:
        yield running


PAGE = """<!doctype html><script>
const told = (text) => fetch("REPORT", {method: "POST", mode: "no-cors", body: text});
const socket = new WebSocket("VERIFIER", ["moa.v1", "BEARER"]);
socket.binaryType = "arraybuffer";
socket.onopen = () => socket.send(Uint8Array.from(HELLO));
socket.onmessage = (message) => told(`${location.protocol} ${socket.protocol} ${message.data.byteLength > 0}`);
socket.onclose = () => told(`${location.protocol} refused`);
</script>"""


@contextlib.contextmanager
def reports(page: str) -> Iterator[tuple[str, queue.Queue[str]]]:
    """Serves the page, and takes what it reports: its URL, and the reports."""
    told: queue.Queue[str] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.replace("REPORT", "/").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            told.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", told
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("of", ["file:", "http:"])
def test_pages_connect_in_a_real_browser(browser, tmp_path, of):
    with serving(ToyEngine(), Settings(token=TOKEN)) as verifier:
        page = PAGE.replace("VERIFIER", verifier.url).replace("BEARER", bearer()).replace("HELLO", str([*hello()]))
        with reports(page) as (url, told):
            file = tmp_path / "page.html"
            file.write_text(page.replace("REPORT", url))
            address, origin = (file.as_uri(), "null") if of == "file:" else (f"{url}/", url)
            for origins, said in [((), f"{of} refused"), ((origin,), f"{of} moa.v1 true")]:
                verifier.parts.settings = Settings(token=TOKEN, origins=origins)
                options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
                options += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
                options += ["--remote-debugging-port=0"]  # else it ends when the page has loaded
                shown = subprocess.Popen([browser, *options, address], stderr=subprocess.PIPE)
                try:
                    assert told.get(timeout=120) == said
                finally:
                    shown.kill()
                    shown.wait()
