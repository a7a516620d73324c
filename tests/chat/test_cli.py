"""Every user error of ``moa-chat`` is one sentence on stderr and exit status 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moa_chat import local_verifier as local
from moa_chat.chat_config import chat_config_for, endpoint_for
from moa_chat.cli import main
from moa_chat.options import build_parser, check_options
from moa_runtime import auto_export as first_bundle
from moa_runtime import optional_deps as extras
from moa_runtime.bundle import Bundle, Fingerprints
from moa_runtime.datastore import write_datastore
from moa_runtime.errors import MoaError
from moa_runtime.transport import Endpoint


def refusal(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-chat: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--once", " "], "not an empty text"),
        (["--json", "--terminal"], "--json belongs to --once"),
        (["--terminal", "--once", "x"], "not allowed with"),
        (["--unknown"], "--unknown"),
        (["--once", "x", "--policy", "maybe"], "--policy"),
        (["--once", "x", "--local", "--server", "ws://a"], "--local starts its own verifier"),
        (["--once", "x", "--local", "--token", "t"], "--local makes its own token"),
        (["--once", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
        (["--once", "x", "--draft-length", "-1"], "--draft-length must be at least 0"),
        (["--once", "x", "--draft-length", "long"], "expected a whole number or auto, thompson, thompson-calibrated"),
        (["--once", "x", "--threads", "0"], "--threads must be at least 1"),
        (["--once", "x", "--offline-limit", "-1"], "--offline-limit must be at least 0"),
        (["--once", "x", "--temperature", "nan"], "--temperature must be"),
        (["--once", "x", "--top-p", "0"], "--top-p must be"),
        (["--once", "x", "--seed", "-1"], "--seed must be"),
        (["--once", "\udcff"], "no valid UTF-8"),
        (["--once", "x", "--policy", "ask"], "--once asks nothing"),
        (["--once", "x", "--allow-origin", "http://a"], "belong to --serve"),
        (["--serve", "--allow-origin", "localhost:3000"], "'localhost:3000' is no origin"),
        (["--terminal", "--gateway-token", "t"], "belong to --serve"),
        (["--serve", "--policy", "rollback"], "cannot take back what it has sent"),
        (["--once", "x", "--no-save"], "--chat and --no-save belong to --terminal"),
        (["--chat", "file"], "the window keeps its chats in its profile"),
        (["--terminal", "--chat", "file", "--no-save"], "--no-save keeps nothing: leave out --chat"),
        (["--serve", "11435"], "expected HOST:PORT"),
        (["--serve", "localhost:99999"], "expected HOST:PORT"),
        (["--serve", "0.0.0.0:11435"], "set a token with --gateway-token or MOA_GATEWAY_TOKEN"),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, list) else "",
)
def test_options(capsys, argv, said):
    assert said in refusal(capsys, *argv)


@pytest.mark.parametrize(("given", "copies"), [((), True), (("--no-ngrams",), False)])
def test_copying_from_the_conversation_can_be_switched_off(given, copies):
    assert chat_config_for(build_parser().parse_args(given), None, None).ngrams is copies


def test_a_window_needs_a_display(capsys, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(extras.MODULES, "desktop", ())
    assert "no display for the window: pass --terminal" in refusal(capsys)


def test_what_is_not_installed_is_named_with_the_command_that_does(capsys, monkeypatch):
    monkeypatch.setitem(extras.MODULES, "desktop", ("no_such_package",))
    said = refusal(capsys)
    assert 'needs no_such_package: pip install "moa-edge[desktop]"; or pass --terminal' in said
    monkeypatch.setitem(extras.MODULES, "gateway", ("no_such_package",))
    assert '--serve needs no_such_package: pip install "moa-edge[gateway]"' in refusal(capsys, "--serve")


def test_no_bundle(capsys, monkeypatch, tmp_path):
    path = str(tmp_path / "none")
    said = f"there is no bundle at {path}: `moa-export --target onnx --out {path}` writes it"
    assert said in refusal(capsys, "--once", "x", "--bundle", path)
    monkeypatch.setenv("MOA_EDGE_BUNDLE", path)
    assert said in refusal(capsys, "--once", "x")


@pytest.mark.parametrize("more", [(), ("--datastore", "off")])
def test_what_an_older_version_made_of_the_chats_is_deleted_at_the_first_start(capsys, monkeypatch, tmp_path, more):
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "none"))
    monkeypatch.setattr("moa_chat.cli.data_dir", lambda: tmp_path)
    made, unfinished, other = (tmp_path / n for n in ("chats.moadata", ".chats.moadata.unfinished", "mine.moadata"))
    for path in (made, unfinished, other):
        path.write_bytes(b"answers")
    assert main(["--once", "x", *more]) == 2
    said = capsys.readouterr().err
    assert f"moa-chat: {made}, which is no longer used, is deleted" in said and "there is no bundle" in said
    assert list(tmp_path.iterdir()) == [other]
    assert "deleted" not in refusal(capsys, "--once", "x", *more)


def test_a_profile_that_cannot_be_has_nothing_to_delete(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "none"))
    monkeypatch.setattr("moa_chat.cli.data_dir", lambda: tmp_path / "file" / "profile")
    (tmp_path / "file").touch()
    assert "there is no bundle" in refusal(capsys, "--once", "x")


def test_if_it_cannot_be_deleted_moa_chat_starts(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "none"))
    monkeypatch.setattr("moa_chat.cli.data_dir", lambda: tmp_path)
    made = tmp_path / "chats.moadata"
    made.mkdir()
    assert main(["--once", "x"]) == 2
    said = capsys.readouterr().err
    assert f"moa-chat: {made}, which is no longer used, cannot be deleted" in said and "there is no bundle" in said


def test_a_datastore_is_a_file_for_the_bundles_tokenizer(onnx_bundle, tmp_path):
    bundle, path = Bundle.open(onnx_bundle), tmp_path / "mine.moadata"
    parse = build_parser().parse_args

    def config(*words):
        return chat_config_for(parse(words), bundle, Endpoint("ws://models.example:8765"))

    for words in ((), ("--datastore", "off")):
        assert config(*words).datastore is None and config(*words).open_datastore() is None
    named = config("--datastore", str(path), "--drafter", "sssd")
    assert (named.drafter, named.datastore) == ("sssd", path)
    with pytest.raises(MoaError, match="there is no datastore"):
        named.open_datastore()
    write_datastore(path, [[1, 2, 3]], bundle.manifest.fingerprints.tokenizer)
    assert named.open_datastore().count([1, 2, 3]) == 1
    write_datastore(path, [[1, 2, 3]], "another tokenizer")
    with pytest.raises(MoaError, match="tokenizer"):
        named.open_datastore()
    for more in (["--backend", "onnx"], ["--no-ngrams"]):
        with pytest.raises(MoaError, match="--drafter sssd has no graph, and copies"):
            check_options(parse(["--drafter", "sssd", *more]))


def test_a_folder_that_is_no_bundle(capsys, tmp_path):
    assert "is no bundle" in refusal(capsys, "--once", "x", "--bundle", str(tmp_path))


@pytest.mark.parametrize(
    ("server", "token", "ca", "said"),
    [
        ("ftp://host", "", False, "no verifier address"),
        ("ws://host:1", "", True, "--tls-ca needs an encrypted address"),
        ("wss://host:1", "", True, "not a certificate authority"),
        ("ws://host:1", "a\nb", False, "visible ASCII"),
    ],
)
def test_endpoints(tmp_path, server, token, ca, said):
    (tmp_path / "ca.pem").write_text("nonsense")
    with pytest.raises(MoaError, match=said):
        endpoint_for(server, token, tmp_path / "ca.pem" if ca else None)


def test_a_ca_file_that_is_not_there(tmp_path):
    with pytest.raises(MoaError, match=r"none\.pem"):
        endpoint_for("wss://host", "", tmp_path / "none.pem")


def test_local_without_the_server_extra(monkeypatch):
    monkeypatch.setitem(extras.MODULES, "server", ("torch", "no_such_package"))
    with (
        pytest.raises(MoaError, match=r'needs no_such_package: pip install "moa-edge\[server\]"'),
        local.local_verifier(),
    ):
        pass


def _program(monkeypatch, script: str) -> None:
    for module in (local, first_bundle):
        monkeypatch.setattr(module, "own_program", lambda *_: [sys.executable, "-c", script])


def test_a_local_verifier_is_stopped_at_the_end(monkeypatch, tmp_path):
    mark = tmp_path / "stopped"
    _program(
        monkeypatch,
        "import json, os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(mark)!r}, 'w').close(), sys.exit(0)))\n"
        "print('loading', flush=True)\n"
        "print(json.dumps({'event': 'ready', 'url': 'ws://127.0.0.1:1/' + os.environ['MOA_TOKEN']}), flush=True)\n"
        "time.sleep(60)",
    )
    with local.local_verifier() as verifier:
        endpoint = verifier.endpoint
        assert endpoint.url == f"ws://127.0.0.1:1/{endpoint.token}" and len(endpoint.token) > 20
        assert not mark.exists()
    assert mark.exists()


def test_a_local_verifier_that_fails_says_why(monkeypatch):
    _program(monkeypatch, "import sys; sys.exit('moa-serve: error: no memory')")
    with pytest.raises(MoaError, match="did not start: moa-serve: error: no memory"), local.local_verifier():
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_export_is_told_to_end_and_waited_for(monkeypatch, tmp_path):
    began, ended = tmp_path / "began", tmp_path / "ended"
    _program(
        monkeypatch,
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(ended)!r}, 'w').close(), sys.exit(1)))\n"
        f"open({str(began)!r}, 'w').close()\n"
        "time.sleep(60)",
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))

    def stop() -> None:
        while not began.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(SystemExit, match="3"):
            first_bundle.make_bundle(tmp_path / "bundle", "onnx", "a test", "no time")
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert ended.exists()


def test_an_export_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "none"))
    _program(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(MoaError, match="could not be exported"):
        local.ensure_bundle()


@pytest.mark.parametrize(
    ("drafter", "named"), [(None, []), ("moa", []), ("sssd", []), ("independent", ["independent"])]
)
def test_the_export_is_told_which_drafter(monkeypatch, tmp_path, drafter, named):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    commands = []

    def own_program(*words):
        commands.append(words)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(first_bundle, "own_program", own_program)
    local.ensure_bundle(drafter)
    [command] = commands
    assert command[command.index("--out") + 1] == str(tmp_path / "bundles" / (named[0] if named else "default"))
    assert [command[at + 1] for at, word in enumerate(command) if word == "--drafter"] == named


def test_help_needs_no_runtime():
    code = (
        "import sys; from moa_chat.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'onnxruntime', 'torch', 'transformers', 'uvicorn', 'PySide6'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--offline-limit" in done.stdout


class Manifest:
    fingerprints = Fingerprints("0123456789abcdef" * 4, "tokenizer", "drafter")


def kept_in(*argv: str) -> tuple[Path | None, bool]:
    config = chat_config_for(build_parser().parse_args(argv), SimpleNamespace(manifest=Manifest), None)
    return config.store, config.must_store


def test_a_conversation_is_kept_where_a_person_types_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert kept_in("--terminal") == (tmp_path / "terminal" / "0123456789abcdef.json", False)
    assert kept_in("--terminal", "--chat", "mine.json") == (Path("mine.json"), True)
    assert kept_in("--terminal", "--no-save") == kept_in("--once", "x") == kept_in() == (None, False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert kept_in("--terminal") == (None, False)
