"""Every user error of ``moa-chat`` is one sentence with a code on stderr, and exit status 2."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from moa_chat import local_verifier as local
from moa_chat.chat_config import chat_config_for, endpoint_for
from moa_chat.cli import _stop, main
from moa_chat.options import UsageError, build_parser, check_options
from moa_runtime import optional_deps
from moa_runtime.errors import MoaError
from moa_runtime.manifest import Fingerprints, RecommendedSampling
from moa_runtime.session.events import Grammar, Sampling
from moa_runtime.transport import ConnectError
from support.refusals import refused


def refusal(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-chat: error: ") and err.count("\n") == 1
    return err


def profile_in(monkeypatch, folder: Path, bundle: Path) -> None:
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(bundle))
    monkeypatch.setattr("moa_chat.cli.data_dir", lambda: folder)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ("--once", "empty"),
        ("--json --terminal", "excluded"),
        ("--terminal --once x", "bad_option"),
        ("--unknown", "bad_option"),
        ("--once x --policy maybe", "bad_option"),
        ("--once x --local --server ws://a", "excluded"),
        ("--once x --local --token t", "excluded"),
        ("--once x --max-new-tokens 0", "out_of_range"),
        ("--once x --draft-length -1", "out_of_range"),
        ("--once x --draft-length long", "bad_option"),
        ("--once x --threads 0", "out_of_range"),
        ("--once x --threads 5000", "out_of_range"),
        ("--once x --offline-limit -1", "out_of_range"),
        ("--once x --temperature nan", "out_of_range"),
        ("--once x --top-p 0", "out_of_range"),
        ("--once x --seed -1", "out_of_range"),
        ("--once \udcff", "not_utf8"),
        ("--once x --policy ask", "excluded"),
        ("--once x --allow-origin http://a", "excluded"),
        ("--terminal --gateway-token t", "excluded"),
        ("--serve --policy rollback", "excluded"),
        ("--once x --chat file", "excluded"),
        ("--chat file", "excluded"),
        ("--terminal --chat file --no-save", "excluded"),
        ("--serve 11435", "bad_address"),
        ("--serve localhost:99999", "bad_address"),
        ("--serve 0.0.0.0:11435", "token_missing"),
        ("--serve 0.0.0.0:11435 --gateway-token schlüssel", "not_ascii"),
    ],
    ids=ascii,
)
def test_invalid_options_are_refused(capsys, argv, code):
    err = refusal(capsys, *argv.split(), *([" "] if code == "empty" else []))
    assert f"[{code}]" in err or (code == "invalid_origin" and "'localhost:3000'" in err)


def test_an_option_that_names_its_value_is_refused_with_it(capsys):
    assert "--max-new-tokens" in (err := refusal(capsys, "--once", "x", "--max-new-tokens", "0")) and "not 0" in err


def test_a_window_needs_a_display(capsys, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(optional_deps.MODULES, "desktop", ())
    assert "[no_display]" in (err := refusal(capsys)) and "--terminal" in err


def test_missing_packages_are_named_with_the_command_that_installs_them(capsys, monkeypatch):
    for extra, argv in (("desktop", ()), ("gateway", ("--serve",))):
        monkeypatch.setitem(optional_deps.MODULES, extra, ("no_such_package",))
        said = refusal(capsys, *argv)
        assert "no_such_package" in said and optional_deps.install_command(extra) in said
    monkeypatch.setitem(optional_deps.MODULES, "server", ("torch", "no_such_package"))
    with pytest.raises(Exception, match=r"pip install .*\[server\]"), local.local_verifier():
        pass


def test_a_missing_bundle_is_named_with_the_command_that_makes_it(capsys, monkeypatch, tmp_path):
    path = str(tmp_path / "none")
    profile_in(monkeypatch, tmp_path / "file" / "profile", tmp_path / "none")
    (tmp_path / "file").touch()  # a profile that cannot be made has nothing to delete
    said = refusal(capsys, "--once", "x", "--bundle", path)
    assert "[no_bundle]" in said and f"`moa-export --target onnx --out {path}`" in said
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    assert "[unreachable]" in refusal(capsys, "--once", "x", "--server", "ws://127.0.0.1:1")
    assert str(tmp_path) in refusal(capsys, "--once", "x", "--bundle", str(tmp_path))


def test_a_port_that_is_used_is_refused_before_a_bundle_is_looked_for(capsys, monkeypatch):
    def taken(host: str, port: int) -> None:
        raise MoaError(f"{host}:{port} is taken", code="cannot_listen")

    monkeypatch.setattr("moa_runtime.sockets.listen", taken)
    assert "[cannot_listen]" in refusal(capsys, "--serve", "127.0.0.1:1", "--bundle", "none")


@pytest.mark.parametrize("mode", [("--serve", "127.0.0.1:0"), ("--once", "x")])
@pytest.mark.parametrize(("offline", "writer"), [((), True), (("--offline", "drafter"), False)])
def test_the_writer_is_fetched_unless_another_offline_mode_is_named(capsys, monkeypatch, mode, offline, writer):
    asked = []

    def fetch(*_: object, **options: object) -> None:
        asked.append(options["writer"])
        raise MoaError("none is fetched here", code="no_bundle")

    monkeypatch.setattr("moa_chat.server_bundle.bundle_for_server", fetch)
    refusal(capsys, *mode, *offline)
    assert asked == [writer]


@pytest.mark.parametrize("more", [(), ("--datastore", "off")])
def test_the_datastore_of_an_older_version_is_deleted_at_the_first_start(capsys, monkeypatch, tmp_path, more):
    profile_in(monkeypatch, tmp_path, tmp_path / "none")
    made, unfinished, other = (tmp_path / n for n in ("chats.moadata", ".chats.moadata.unfinished", "mine.moadata"))
    for path in (made, unfinished, other):
        path.write_bytes(b"answers")
    assert main(["--once", "x", "--bundle", str(tmp_path / "none"), *more]) == 2
    said = capsys.readouterr().err
    assert str(made) in said and "[no_bundle]" in said and list(tmp_path.iterdir()) == [other]
    assert str(made) not in refusal(capsys, "--once", "x", "--bundle", str(tmp_path / "none"), *more)
    made.mkdir()  # which cannot be deleted like a file: moa-chat starts nevertheless
    assert main(["--once", "x", "--bundle", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert str(made) in said and "[no_bundle]" in said and made.is_dir()


@pytest.mark.parametrize(
    ("server", "token", "ca", "code"),
    [
        ("ws://host:1", "", "ca.pem", "not_encrypted"),
        ("wss://host:1", "", "ca.pem", "certificate_unreadable"),
        ("wss://host:1", "", "none.pem", "unreadable"),
        ("ws://host:1", "a\nb", None, "not_ascii"),
    ],
)
def test_an_unusable_address_token_or_authority_is_refused(tmp_path, server, token, ca, code):
    (tmp_path / "ca.pem").write_text("nonsense")
    with refused(code):
        endpoint_for(server, token, tmp_path / ca if ca else None)


def test_an_invalid_address_or_origin_is_named(capsys):
    with pytest.raises(ConnectError, match="ftp://host"):
        endpoint_for("ftp://host", "", None)
    assert "'localhost:3000'" in refusal(capsys, "--serve", "--allow-origin", "localhost:3000")


class Manifest:
    fingerprints = Fingerprints("0123456789abcdef" * 4, "tokenizer", "drafter")
    sampling = RecommendedSampling(0.2, 0.9)


def config_of(*argv: str):
    return chat_config_for(build_parser().parse_args(argv), SimpleNamespace(manifest=Manifest), None)


def kept_in(*argv: str) -> tuple[Path | None, bool]:
    return config_of(*argv).store, config_of(*argv).must_store


def test_a_conversation_is_kept_if_a_person_types_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert kept_in("--terminal") == (tmp_path / "terminal" / "0123456789abcdef.json", False)
    assert kept_in("--terminal", "--chat", "mine.json") == (Path("mine.json"), True)
    assert kept_in("--terminal", "--no-save") == kept_in("--once", "x") == kept_in() == (None, False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert kept_in("--terminal") == (None, False)
    assert config_of().ngrams and not config_of("--no-ngrams").ngrams
    overflows = [config_of(*words).overflow for words in ((), ("--serve",), ("--serve", "--context-overflow", "trim"))]
    assert overflows == ["trim", "error", "trim"]


@pytest.mark.parametrize(
    ("argv", "sampling"),
    [
        ((), (0.2, 0.9)),
        (("--temperature", "0"), (0, 1)),
        (("--temperature", "1", "--top-p", "0.5"), (1, 0.5)),
        (("--top-p", "0.5"), (0.2, 0.5)),
    ],
)
def test_answers_are_sampled_as_the_models_authors_recommend(monkeypatch, argv, sampling):
    assert (config_of(*argv).temperature, config_of(*argv).top_p) == sampling
    monkeypatch.setattr(Manifest, "sampling", None)
    assert config_of().temperature == 0


@pytest.mark.parametrize("program", ["moa_bench", "moa_chat", "moa_drafter", "moa_export", "moa_server"])
def test_each_program_says_its_version(capsys, program):
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"{program}.cli").main(["--version"])
    assert capsys.readouterr().out.split()[1] == version("moa-edge")


@pytest.mark.parametrize("program", ["moa_bench", "moa_chat", "moa_drafter", "moa_export", "moa_server"])
def test_a_wrong_option_is_one_sentence(capsys, program):
    words = ["network"] if program == "moa_bench" else ["--out", "none"] if program == "moa_drafter" else []
    assert importlib.import_module(f"{program}.cli").main([*words, "--abacus"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "--abacus" in err and err.endswith("[bad_option]\n")


def test_sigterm_says_that_it_stopped(capsys):
    with pytest.raises(SystemExit, match="143"):
        _stop(15, None)
    assert capsys.readouterr().err == "moa-chat: stopped\n"


def test_answers_conform_to_the_schema_that_is_named(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    assert config_of("--terminal", "--schema", "json", "--seed", "5").sampling() == Sampling(
        0.2, 0.9, 5, grammar=Grammar("json_object")
    )
    named = config_of("--once", "x", "--schema", str(tmp_path / "schema.json"), "--temperature", "0").sampling()
    assert named == Sampling(grammar=Grammar("json_schema", '{"type": "array"}'))
    (tmp_path / "broken.json").write_text("{")
    for file in ("broken.json", "missing.json"):
        with refused("bad_option", UsageError):
            build_parser().parse_args(["--once", "x", "--schema", str(tmp_path / file)])
    for words in (["--serve"], []):
        with refused("excluded", UsageError):
            check_options(build_parser().parse_args([*words, "--schema", "json"]))
