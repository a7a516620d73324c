"""``moa-chat --drafter``: the names that it offers, the bundle and verifier that it takes, and its refusals."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moa_chat import local_verifier as local
from moa_chat.chat_config import open_bundle
from moa_chat.cli import main
from moa_chat.options import build_parser, check_options, drafters_help
from moa_drafter.target_source import DEFAULT_TARGET
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.factory import backend_for, drafter_for
from moa_runtime.errors import MoaError
from moa_runtime.options import DRAFTERS, OtherDrafterError
from support.refusals import refused
from support.tiny import make_tiny_bundle


@pytest.fixture
def bundles(once, tiny_target, tiny_shipped) -> dict[str, Path]:
    """Of each shipped drafter with a graph."""

    def bundle(name: str) -> Path:
        def make(folder: Path) -> None:
            make_tiny_bundle(folder, tiny_target, tiny_shipped / name, "none", questions=())

        return once(f"shipped-bundle-{name}", make)

    return {name: bundle(name) for name, kind in DRAFTERS.items() if kind.has_graph}


@pytest.fixture
def signals() -> Iterator[None]:
    """``moa-chat --local`` in this process; what it does with signals is taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_only_drafters_with_weights_are_offered(tmp_path, monkeypatch):
    monkeypatch.setattr("moa_drafter.pretrained.WEIGHTS", tmp_path)
    for name in ("early-exit", "moa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    said = build_parser().format_help()
    assert "moa: Mixture" in " ".join(said.split()) and "independent:" not in said
    for name in ("moa", "sssd", "early-exit"):
        assert f"{name}: {DRAFTERS[name].help}" in drafters_help() and "right " in DRAFTERS[name].help
    with refused("bad_option", MoaError, "independent", "sssd"):
        build_parser().parse_args(["--drafter", "independent"])
    for more in (["--once", "x", "--local"], ["--once", "x", "--bundle", "b"], ["--local", "--bundle", "b"]):
        with refused("bad_option", MoaError, str(tmp_path)):
            check_options(build_parser().parse_args(["--drafter", str(tmp_path), *more]))
    for words in (["--once", "x", "--model", "m"], ["--local", "--model", "m"]):
        with refused("excluded"):
            check_options(build_parser().parse_args(words))


def test_a_bundle_of_another_drafter_is_refused(bundles):
    for name, bundle in bundles.items():
        for wanted in DRAFTERS:
            if wanted == name or not DRAFTERS[wanted].has_graph:
                assert open_bundle(bundle, wanted).folder == bundle
                continue
            with pytest.raises(OtherDrafterError) as caught:
                open_bundle(bundle, wanted)
            assert all(part in str(caught.value) for part in (str(bundle), name, f"moa-export --drafter {wanted}"))
        assert open_bundle(bundle).folder == bundle


def test_the_runtime_refuses_another_architecture(bundles):
    bundle = Bundle.open(bundles["early-exit"])
    with pytest.raises(OtherDrafterError, match=r"early-exit.* moa"):
        backend_for(bundle, "moa")
    assert backend_for(bundle, "sssd") is None
    assert backend_for(bundle, "early-exit", threads=1).kv_shape == backend_for(bundle, threads=1).kv_shape


def test_a_missing_bundle_is_named_with_the_command_that_makes_it(monkeypatch, tmp_path, tiny_shipped):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    path = tmp_path / "bundles" / "early-exit"
    with refused("no_bundle", MoaError, f"`moa-export --target onnx --drafter early-exit --out {path}`"):
        open_bundle(None, "early-exit")


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_can_be_chosen_by_name(name, bundles, tiny_shipped, tiny_target, signals, tmp_path, monkeypatch, capsys):
    """Its bundle is made where there is none, the verifier here fits it, and the text is the target's."""
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    exported, served = [], []
    real = local.local_verifier

    def export(folder: Path, target: str, program: str, drafter: str | None) -> None:
        exported.append((folder.name, drafter))
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(bundles[drafter if DRAFTERS[drafter].has_graph else "moa"])

    def serve(options: tuple[str, ...], *, restarts: bool, waits: bool):
        served.append(options)
        folder = tiny_shipped / (options[1] if options else "moa")
        return real(("--model", str(tiny_target), "--drafter", str(folder), "--threads", "1"), waits=waits)

    monkeypatch.setattr(local, "make_bundle", export)
    monkeypatch.setattr(local, "local_verifier", serve)
    words = ["--once", "Name three colours.", "--local", "--threads", "1", "--max-new-tokens", "12", "--json"]
    words += ["--drafting", "device", "--draft-length", "3"]
    assert main([*words, "--drafter", name]) == 0
    result = json.loads(capsys.readouterr().out)
    own = () if name == "moa" or not DRAFTERS[name].has_graph else ("--drafter", name)
    assert (exported, served) == ([("default" if not own else name, name)], [own])
    assert len(result["tokens"]) == 12 and result["statistics"]["rounds"] > 0
    assert result["text"] == _plain(tiny_target)


def test_a_target_without_a_drafter_is_chatted_with(tiny_target, signals, tmp_path, monkeypatch, capsys):
    """A bundle without a graph is made, the device copies, and the text is the target's."""
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    words = ["--once", "Name three colours.", "--local", "--model", str(tiny_target), "--threads", "1", "--json"]
    for drafting in ("device", "server"):
        assert main([*words, "--max-new-tokens", "12", "--drafting", drafting]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["text"] == _plain(tiny_target) and result["target"] == tiny_target.name
    [made] = (path for path in (tmp_path / "bundles").iterdir() if path.is_dir())  # beside its lock
    bundle = Bundle.open(made)
    assert bundle.manifest.architecture == "sssd" and drafter_for(bundle.manifest, backend_for(bundle)) is not None


def test_a_bundle_names_the_target_and_the_drafter_of_its_verifier(bundles, tiny_shipped, tiny_target):
    manifest = dataclasses.replace(Bundle.open(bundles["moa"]).manifest, target=str(tiny_target))
    assert local.serve_options(manifest) == ("--model", str(tiny_target), "--drafter", "moa")
    assert local.serve_options(dataclasses.replace(manifest, target=DEFAULT_TARGET)) == ()
    other = Bundle.open(bundles["independent"]).manifest
    assert local.serve_options(other, DEFAULT_TARGET) == ("--drafter", "independent")
    own = dataclasses.replace(manifest, fingerprints=dataclasses.replace(manifest.fingerprints, drafter="00"))
    assert local.serve_options(own, drafter="folder")[2:] == ("--drafter", "folder")
    with refused("unknown_drafter"):
        backend_for(Bundle.open(bundles["moa"]), "larn")
    with refused("unknown_drafter"):
        local.serve_options(own)
    with refused("unknown_target"):
        local.serve_options(dataclasses.replace(manifest, target="somewhere"))


def _plain(target: Path) -> str:
    """The target's own answer."""
    from moa_bench.harness import checkpoint_pair
    from moa_drafter.target import load_target
    from moa_runtime.session.events import Sampling
    from moa_server.engine.baseline import decode

    device, engine = checkpoint_pair("sssd", load_target(str(target)))
    question = device.tokenizer.encode_chat([{"role": "user", "content": "Name three colours."}])
    return device.tokenizer.decode([step.token for step in decode(engine, question, Sampling(), 12)])
