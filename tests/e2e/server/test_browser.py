"""Connections of web pages in a real browser, and the verifier's own page: TLS, origins and its policy."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import subprocess
from urllib.parse import quote

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from integration.server.test_pages import TOKEN, bearer, hello
from moa_server.settings import Settings
from moa_server.web.certificate import own_certificate
from moa_server.web.pairing import link_with_token, page_urls
from moa_server.web.site import WebFile
from support.server.edge_running import eventually
from support.server.running import serving
from support.server.web_site import SCRIPT, site
from support.toy_engine import ToyEngine

#: Tells another server what its connection came to, by requesting a path that is missing.
PAGE = """<!doctype html><script>
const told = (text) => fetch("REPORT/said/" + text, {mode: "no-cors"});
const socket = new WebSocket("VERIFIER", ["moa.v1", "BEARER"]);
socket.binaryType = "arraybuffer";
socket.onopen = () => socket.send(Uint8Array.from(HELLO));
socket.onmessage = (message) => told(`${socket.protocol}/${message.data.byteLength > 0}`);
socket.onclose = () => told("refused");
</script>"""


class Watched(dict):
    """Files, and the requested paths."""

    def __init__(self, *files) -> None:
        super().__init__(*files)
        self.asked: list[str] = []

    def __contains__(self, path: object) -> bool:
        self.asked.append(str(path))
        return super().__contains__(path)

    def said(self) -> list[str]:
        return next((path.split("/")[2:] for path in self.asked if path.startswith("/said/")), [])


@pytest.fixture
def shown(browser, tmp_path):
    """A function that opens an address in the browser, for a block."""

    def showing(address: str, *more: str) -> subprocess.Popen:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
        options += ["--remote-debugging-port=0"]  # else it ends when the page has loaded
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([browser, *options, *more, address], **quiet)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    with contextlib.ExitStack() as stack:
        yield showing


@pytest.mark.parametrize("of", ["file:", "http:"])
def test_pages_of_allowed_origins_connect(shown, tmp_path, of):
    files = Watched()
    with serving(ToyEngine(), Settings(token=TOKEN)) as verifier, serving(ToyEngine(), Settings(), files=files) as site:
        url = f"http://127.0.0.1:{site.port}"
        page = PAGE.replace("VERIFIER", verifier.url).replace("BEARER", bearer()).replace("REPORT", url)
        file = tmp_path / "page.html"
        file.write_text(page.replace("HELLO", str([*hello()])))
        files["/page.html"] = WebFile(file, "text/html", "1", {})
        address, origin = (file.as_uri(), "null") if of == "file:" else (f"{url}/page.html", url)
        for origins, said in [((), ["refused"]), ((origin,), ["moa.v1", "true"])]:
            verifier.parts.settings = Settings(token=TOKEN, origins=origins)
            files.asked.clear()
            process = shown(address)
            assert eventually(files.said, seconds=120) == said
            process.kill()
            process.wait()


#: Tells what it may do by requesting a path that is missing.
PROGRAM = """
const said = [isSecureContext ? "secure" : "insecure"];
const attempt = async (name, what) => { try { await what(); said.push(name); } catch { said.push("no-" + name); } };
await attempt("wasm", () => WebAssembly.compile(Uint8Array.from([0, 97, 115, 109, 1, 0, 0, 0])));
await attempt("eval", () => new Function("return 1")());
await attempt("service-worker", () => navigator.serviceWorker.register("sw.js"));
await attempt("storage", () => navigator.storage.getDirectory());
await attempt("other-hosts", () => new Promise((resolve, reject) => {
  document.addEventListener("securitypolicyviolation", reject);
  fetch("http://127.0.0.1:9/").catch(() => {}).then(() => setTimeout(resolve, 100));
}));
const token = decodeURIComponent(location.hash.replace("#token=", ""));
const bearer = "moa.bearer." + btoa(token).replaceAll("=", "");
const socket = new WebSocket(location.origin.replace("http", "ws") + "/v1/session", ["moa.v1", bearer]);
socket.onopen = () => socket.send(Uint8Array.from(HELLO));
socket.onmessage = () => fetch("/said/" + [...said, "session"].join("/"));
socket.onclose = () => fetch("/said/" + [...said, "refused"].join("/"));
"""


def trusted(certificate: bytes) -> str:
    """The option with which Chromium trusts one certificate, as if its authority were installed."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return "--ignore-certificate-errors-spki-list=" + base64.b64encode(hashlib.sha256(spki).digest()).decode()


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_the_page_may_do_what_its_policy_and_tls_allow(shown, tmp_path, outer_address, secure):
    program = PROGRAM.replace("HELLO", str([*hello()]))
    files = Watched(site(tmp_path, **{SCRIPT: program}))
    made = own_certificate(tmp_path / "web", [outer_address])
    tls = (made.file, made.file) if secure else None
    settings = Settings(token=TOKEN, loopback=False)
    with serving(ToyEngine(), settings, files=files, tls=tls, host=outer_address) as verifier:
        (url,) = page_urls("https" if secure else "http", [outer_address], verifier.port)
        shown(link_with_token(url, TOKEN), trusted(made.file.read_bytes()))
        said = eventually(files.said, seconds=120)
        whole = ["secure", "wasm", "no-eval", "service-worker", "storage", "no-other-hosts", "session"]
        online = ["insecure", "wasm", "no-eval", "no-service-worker", "no-storage", "no-other-hosts", "session"]
        assert said == (whole if secure else online)
        assert not [path for path in files.asked if TOKEN in path or quote(TOKEN) in path]
