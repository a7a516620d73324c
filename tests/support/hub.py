"""A stand-in for the Hub on loopback: what huggingface_hub asks for, with lengths, ranges and cut replies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by their ids, each a folder; ``HF_ENDPOINT`` is its :attr:`url`.

    Attributes:
        asked: files that were asked for, with the first byte of the range.
        cuts: bytes of a file's reply after which the connection breaks, each once.
    """

    def __init__(
        self, repositories: dict[str, Path], cuts: dict[str, list[int]], refusal: tuple[int, str] = (404, "")
    ) -> None:
        self._repositories, self.cuts, self._refusal = repositories, cuts, refusal
        self.asked: list[tuple[str, int]] = []
        self.url = ""

    def reply(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        if found := re.fullmatch(r"/api/models/(?P<id>[^/]+/[^/]+)/(?P<what>revision|tree)/.*", path):
            if (folder := self._repositories.get(found["id"])) is None:
                status, code = self._refusal
                return self._send(handler, b"{}", status, {"X-Error-Code": code} if code else None)
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            listed = [
                {
                    "type": "file",
                    "path": file.relative_to(folder).as_posix(),
                    "size": file.stat().st_size,
                    "oid": _oid(file),
                }
                for file in files
            ]
            told = {"id": found["id"], "sha": COMMIT, "siblings": [{"rfilename": each["path"]} for each in listed]}
            return self._send(handler, json.dumps(told if found["what"] == "revision" else listed).encode())
        found = re.fullmatch(r"/(?P<id>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)", path)
        file = self._repositories[found["id"]] / found["file"] if found and found["id"] in self._repositories else None
        if file is None or not file.is_file():
            return self._send(handler, b"", 404)
        self._send_file(handler, file)

    def _send_file(self, handler: BaseHTTPRequestHandler, file: Path) -> None:
        data, headers = file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(file)}"'}
        start = int(found[1]) if (found := re.match(r"bytes=(\d+)-", handler.headers.get("Range", ""))) else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = None
        if handler.command == "GET":
            self.asked.append((file.name, start))
            cut = self.cuts[file.name].pop(0) if self.cuts.get(file.name) else None
        self._send(handler, data[start:], 206 if start else 200, headers, cut)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        body: bytes,
        status: int = 200,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body[:cut])
        handler.close_connection = True


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def standing_in(
    repositories: dict[str, Path], cuts: dict[str, list[int]] | None = None, refusal: tuple[int, str] = (404, "")
) -> Iterator[Hub]:
    """Serve repositories while the context is open; others are refused with a status and the Hub's code of errors."""
    hub = Hub(repositories, cuts or {}, refusal)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.reply(self)

        do_HEAD = do_GET  # noqa: N815 - the name that the server calls

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
