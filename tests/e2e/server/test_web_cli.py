"""``moa-serve --web``: refusals, and from the command to the phone's first request."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys

import httpx
import pytest

from e2e.server.test_serve_cli import refusal
from moa_page import page_folder
from moa_runtime import optional_deps as extras
from moa_runtime.bundle import read_manifest, write_manifest
from moa_server.web import setup as web_setup
from moa_server.web.pairing import hosts_of, link_with_token, qr_code
from support.server.web_site import GRAPH, write_page


@pytest.fixture
def page(tmp_path, monkeypatch):
    folder = write_page(tmp_path / "page")
    monkeypatch.setattr(web_setup, "page_folder", lambda: folder)
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path / "profile"))
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    monkeypatch.delenv("MOA_TOKEN", raising=False)
    return folder


@pytest.fixture(scope="module")
def web_bundle(onnx_bundle, tmp_path_factory):
    """The tiny bundle with an entry for browsers; the verifier does not compute with it."""
    folder = tmp_path_factory.mktemp("web") / "bundle"
    shutil.copytree(onnx_bundle, folder)
    manifest = read_manifest(folder)
    entry = dataclasses.replace(manifest.targets["onnx"], file=GRAPH)
    shutil.copy(folder / manifest.targets["onnx"].file, folder / GRAPH)
    write_manifest(folder, dataclasses.replace(manifest, targets={**manifest.targets, "web": entry}))
    return folder


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tls-cert", "auto"], "[needs_web]"),
        (["--bundle", "x"], "[needs_web]"),
        (["--web", "--tls-cert", "auto", "--tls-key", "key.pem"], "[options_conflict]"),
        (["--web", "--bundle", "none"], "none"),
        (["--web", "--model", "{target}"], "[bundle_missing]"),
        (["--web", "--bundle", "{onnx}"], "[no_web_graph]"),
        (["--web", "--bundle", "{web}"], "[other_target]"),
        (["--web", "--host", "nowhere.invalid"], "nowhere.invalid"),
        (["--web", "--host", "läptop.local", "--tls-cert", "auto"], "[not_ascii]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(capsys, page, tiny_target, onnx_bundle, web_bundle, argv, said):
    if "{web}" in argv:  # of a target without its drafter
        argv = [*argv, "--model", str(tiny_target)]
    paths = {"target": tiny_target, "onnx": onnx_bundle, "web": web_bundle}
    assert said in refusal(capsys, "--port", "0", *(part.format(**paths) for part in argv))


def test_a_missing_page_or_package_is_refused(capsys, page, monkeypatch, tmp_path):
    monkeypatch.setitem(extras.MODULES, "web", ("no_such_package",))
    assert "no_such_package" in refusal(capsys, "--web", "--port", "0", "--tls-cert", "auto")
    monkeypatch.setattr("moa_page.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(web_setup, "page_folder", page_folder)
    assert "make web" in refusal(capsys, "--web", "--port", "0")


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("form", ["terminal", "json"])
def test_from_the_command_to_the_page(page, tiny_target, tiny_drafter, web_bundle, tmp_path, form):
    hosts = hosts_of("0.0.0.0")
    if not hosts:
        pytest.skip("this machine has no address but loopback")
    program = (
        "import sys, moa_page, pathlib; page = pathlib.Path(sys.argv.pop(1))\nmoa_page.page_folder = lambda: page\n"
    )
    program += "from moa_server.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, str(page), "--web", "--host", "0.0.0.0", "--tls-cert", "auto"]
    command += ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--bundle", str(web_bundle)]
    command += ["--port", "0", "--threads", "1", *(["--json"] if form == "json" else [])]
    ours, theirs = os.openpty() if form == "terminal" else os.pipe()
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment) as process:
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8", newline="") as told:
            ready = told.readline()
            port = int(re.search(r":(\d+)/v1/session", ready)[1])
            token = (tmp_path / "profile" / "web" / "token").read_text()
            url = f"https://{hosts[0]}:{port}/"
            if form == "json":
                assert json.loads(ready)["pages"][0] == url
                said = ready
                fingerprint = json.loads(ready)["authority"]
            else:
                said = ""
                while "iOS: " not in said:
                    said += told.readline().replace("\r\n", "\n")
                assert qr_code(link_with_token(url, token)) in said and url in said
                fingerprint = re.search(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", said)[0]
            assert token not in said
            authority = httpx.get(f"https://127.0.0.1:{port}/ca.crt", verify=False)
            assert authority.headers["content-type"] == "application/x-x509-ca-cert"
            shown = ssl.PEM_cert_to_DER_cert(authority.text)
            assert hashlib.sha256(shown).hexdigest() == fingerprint.replace(":", "").lower()
            trusting = ssl.create_default_context(cadata=authority.text)
            assert httpx.get(url, verify=trusting).content == (page / "index.html").read_bytes()
            manifest = httpx.get(f"{url}bundle/manifest.json", verify=trusting)
            assert manifest.content == (web_bundle / "manifest.json").read_bytes()
            own = {"Origin": url.rstrip("/")}
            assert httpx.get(f"{url}v1/status", verify=trusting, headers=own).status_code == 401
            own["Authorization"] = f"Bearer {token}"
            assert httpx.get(f"{url}v1/status", verify=trusting, headers=own).status_code == 200
            process.send_signal(signal.SIGTERM)
            err = process.stderr.read()
    assert (process.returncode, err) == (0, "")
