"""``moa-serve``: refusals in one sentence, a ready line, a quiet end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys

import httpx
import pytest

from moa_page import page_folder
from moa_runtime import AnswerFinished, Bundle, Endpoint, SyncChat
from moa_runtime import optional_deps as extras
from moa_runtime.bundle import write_manifest
from moa_runtime.manifest import read_manifest
from moa_server.auth import new_token
from moa_server.cli import main
from moa_server.web import setup as web_setup
from moa_server.web.pairing import hosts_of, link_with_token, qr_code
from support.server.edge_running import eventually
from support.server.running import after_steps, moa_serve
from support.server.web_site import GRAPH, write_page

SIGNALS = pytest.mark.skipif(os.name == "nt", reason="signals")


def refusal(capsys, *argv: str) -> str:
    """The sentence of a refused command; it must be one line."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    err = after_steps(err)
    assert out == "" and err.startswith("moa-serve: error: ") and err.count("\n") == 1
    return err


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refusal(capsys, "--port", port)


#: moa-serve in an environment that lacks packages.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
from moa_server.cli import main
sys.exit(main())
"""


@SIGNALS
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_verifier_needs_neither_torch_nor_transformers(tiny_target, tiny_drafter, onnx_bundle, dtype):
    command = [sys.executable, "-c", WITHOUT, "torch,transformers,accelerate,gguf", "--json", "--port", "0"]
    command += ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--threads", "1", "--accept-rounding"]
    with subprocess.Popen([*command, "--dtype", dtype], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        ready = json.loads(process.stdout.readline() or process.stderr.read())
        with SyncChat(Bundle.open(onnx_bundle), Endpoint(ready["url"])) as chat:
            for question in ("Why?", "And then?"):
                *_, end = chat.send(question, max_new_tokens=24)
                assert isinstance(end, AnswerFinished) and end.tokens and end.statistics.dtype == dtype
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read()
    assert (process.returncode, after_steps(err.decode())) == (0, "")


def test_where_torch_is_needed_and_missing_a_sentence_says_so(capsys, monkeypatch, tiny_target):
    monkeypatch.setitem(extras.MODULES, "torch", ("no_such_package",))
    monkeypatch.setattr("moa_server.engine.load.has_bfloat16", lambda: True)
    for option, value in (("--dtype", "bfloat16"), ("--device", "cuda")):
        error = refusal(capsys, "--doctor", "--model", str(tiny_target), option, value)
        assert "[missing_package]" in error and extras.install_command("torch") in error and value in error


def test_an_installation_for_devices_says_what_a_verifier_needs():
    """It has the script, too, and its --help."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('granian', 'onnx', 'prometheus_client', 'starlette')))\n"
        "from moa_server.cli import main; sys.exit(main())"
    )
    for option, status in (("--help", 0), ("--json", 2)):
        done = subprocess.run([sys.executable, "-c", program, option], capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
    assert "granian" in done.stderr and "[missing_package]" in done.stderr and done.stderr.count("\n") == 1


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
        (["--model", "no-such-model"], "'no-such-model'"),
        (["--model", "{target}", "--drafter", "{target}"], "drafter"),
        (["--model", "{target}", "--drafter", "larn"], "larn"),
        (["--model", "{target}", "--drafter", "moa"], "moa"),
        (["--model", "{target}", "--max-context", "1000"], "1000"),
        (["--model", "{target}", "--device", "abacus"], "abacus"),
        (["--host", "0.0.0.0"], "[token_missing]"),
        (["--host", "::"], "[token_missing]"),
        (["--token", "two\nlines"], "[not_ascii]"),
        (["--host", "nowhere.invalid", "--token", "t"], "nowhere.invalid"),
        (["--port", "99999"], "[out_of_range]"),
        (["--max-sessions", "0"], "[out_of_range]"),
        (["--idle-seconds", "nan"], "[out_of_range]"),
        (["--timeline", "nowhere/out.json"], "nowhere/out.json"),
        (["--allow-origin", "https://app.example/"], "'https://app.example/'"),
        (["--tls-cert", "cert.pem"], "[incomplete]"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "[bad_certificate]"),
        (["--tls-cert", "{target}/config.json", "--tls-key", "{target}/config.json"], "PEM format"),
        (["--tls-cert", "auto"], "[needs_web]"),
        (["--bundle", "x"], "[no_bundle]"),
        (["--web", "--tls-cert", "auto", "--tls-key", "key.pem"], "[options_conflict]"),
        (["--web", "--bundle", "none"], "none"),
        (["--web", "--model", "{target}", "--drafter", "{drafter}"], "[no_bundle]"),
        (["--web", "--bundle", "{onnx}"], "[no_web_graph]"),
        (["--web", "--bundle", "{web}", "--model", "{target}"], "[other_target]"),
        (["--web", "--host", "nowhere.invalid"], "nowhere.invalid"),
        (["--web", "--host", "läptop.local", "--tls-cert", "auto"], "[not_ascii]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be_used_are_refused(
    capsys, page, tiny_target, tiny_drafter, onnx_bundle, web_bundle, argv, said
):
    paths = {"target": tiny_target, "drafter": tiny_drafter, "onnx": onnx_bundle, "web": web_bundle}
    port = [] if "--port" in argv else ["--port", "0"]
    assert said in refusal(capsys, *port, *(part.format(**paths) for part in argv))


@pytest.fixture
def model(tiny_target, tiny_drafter) -> tuple[str, ...]:
    return "--model", str(tiny_target), "--drafter", str(tiny_drafter)


@pytest.fixture
def token_file(tmp_path):
    """A token file, and the token of its only entry."""
    file = tmp_path / "tokens.json"
    token, entry = new_token("alice")
    file.write_text(f'{{"tokens": [{entry}]}}')
    return file, token


@SIGNALS
def test_it_serves_until_sigterm(model):
    with moa_serve(*model, env={**os.environ, "MOA_TOKEN": "secret"}) as (process, ready):
        assert ready["event"] == "ready" and ready["url"] == f"ws://127.0.0.1:{ready['port']}/v1/session"
        base = f"http://127.0.0.1:{ready['port']}"
        status = httpx.get(f"{base}/v1/status", headers={"Authorization": "Bearer secret"})
        assert all(status.json()[name] == ready[name] for name in ("fingerprints", "dtype", "target_pass"))
        assert httpx.post(f"{base}/v1/decode", json={"tokens": [5]}).status_code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, after_steps(err)) == (0, "", "")


SIGHUP_EARLY = """
import os, signal, sys
from pathlib import Path
from moa_server import cli, process

load, warm_up = cli.load_engine, process.warm_up

def loading(options, progress):
    os.kill(os.getpid(), signal.SIGHUP)
    return load(options, progress)

async def warming(*args):
    Path(sys.argv[-1]).write_text('{"tokens": []}')
    os.kill(os.getpid(), signal.SIGHUP)
    return await warm_up(*args)

cli.load_engine, process.warm_up = loading, warming
sys.exit(cli.main())
"""


@SIGNALS
def test_sighup_has_the_tokens_read_and_before_it_is_ready_is_not_lost(model, token_file):
    file, token = token_file
    tokens = file.read_text()
    with moa_serve(*model, "--token-file", file, program=SIGHUP_EARLY) as (process, ready):
        assert ready, f"it ended with {process.wait()}"
        request = {
            "url": f"http://127.0.0.1:{ready['port']}/v1/status",
            "headers": {"Authorization": f"Bearer {token}"},
        }
        assert httpx.get(**request).status_code == 401
        file.write_text(tokens)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: httpx.get(**request).status_code == 200)


@pytest.mark.parametrize(
    ("stdin", "ready"), [(subprocess.PIPE, True), (subprocess.DEVNULL, False)], ids=["serving", "loading"]
)
def test_it_ends_with_its_standard_input(model, stdin, ready):
    with moa_serve(*model, "--until-stdin-ends", stdin=stdin) as (process, line):
        assert bool(line) == ready
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, after_steps(err)) == (0, "", "")


def test_without_a_standard_input_none_can_end(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "[no_stdin]" in refusal(capsys, "--until-stdin-ends")


# -- the page ---------------------------------------------------------------------------------------


def test_a_missing_page_or_package_is_refused(capsys, page, monkeypatch, tmp_path):
    monkeypatch.setitem(extras.MODULES, "web", ("no_such_package",))
    assert "no_such_package" in refusal(capsys, "--web", "--port", "0", "--tls-cert", "auto")
    monkeypatch.setattr("moa_page.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(web_setup, "page_folder", page_folder)
    monkeypatch.setattr("moa_page.installed_from", lambda: tmp_path)
    assert "make web" in refusal(capsys, "--web", "--port", "0")
    built = write_page(tmp_path / "apps" / "moa_page" / "static")
    assert page_folder() == built, "it was built in the checkout after the installation"


@SIGNALS
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
    assert (process.returncode, after_steps(err)) == (0, "")
