"""Every user error of ``moa-chat`` is one sentence on stderr and exit status 2."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moa_chat import local_verifier as local
from moa_chat.chat_config import chat_config_for, endpoint_for
from moa_chat.cli import main
from moa_chat.options import build_parser
from moa_runtime import optional_deps as extras
from moa_runtime.bundle import Fingerprints
from moa_runtime.errors import MoaError


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
