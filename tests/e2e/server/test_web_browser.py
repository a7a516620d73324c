"""The page in a real browser, on an address that others reach: what TLS changes, and what the policy allows."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from urllib.parse import quote

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from integration.server.test_pages import TOKEN, hello
from moa_server.settings import Settings
from moa_server.web.certificate import own_certificate
from moa_server.web.pairing import link_with_token, page_urls
from support.server.edge_running import eventually
from support.server.running import serving
from support.server.web_site import SCRIPT, site
from support.toy_engine import ToyEngine

#: Says what it may do by asking for a path that is not there.
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


class Watched(dict):
    """Files, and which paths were asked for."""

    asked: list[str]

    def __contains__(self, path: object) -> bool:
        self.asked.append(str(path))
        return super().__contains__(path)

    def said(self) -> list[str]:
        return next((path.split("/")[2:] for path in self.asked if path.startswith("/said/")), [])


def trusted(certificate: bytes) -> str:
    """The option with which Chromium trusts one certificate, as if its authority were installed."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return "--ignore-certificate-errors-spki-list=" + base64.b64encode(hashlib.sha256(spki).digest()).decode()


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_what_the_page_may_do(browser, tmp_path, outer_address, secure):
    program = PROGRAM.replace("HELLO", str([*hello()]))
    files = Watched(site(tmp_path, **{SCRIPT: program}))
    files.asked = []
    made = own_certificate(tmp_path / "web", [outer_address])
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--remote-debugging-port=0", trusted(made.file.read_bytes())]
    tls = (made.file, made.file) if secure else None
    settings = Settings(token=TOKEN, loopback=False)
    with serving(ToyEngine(), settings, files=files, tls=tls, host=outer_address) as verifier:
        (url,) = page_urls("https" if secure else "http", [outer_address], verifier.port)
        command = [browser, *options, link_with_token(url, TOKEN)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shown:
            try:
                said = eventually(files.said, seconds=120)
            finally:
                shown.kill()
        whole = ["secure", "wasm", "no-eval", "service-worker", "storage", "no-other-hosts", "session"]
        online = ["insecure", "wasm", "no-eval", "no-service-worker", "no-storage", "no-other-hosts", "session"]
        assert said == (whole if secure else online)
        assert not [path for path in files.asked if TOKEN in path or quote(TOKEN) in path]
