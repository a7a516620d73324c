"""Drafters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import CONFIG_FILE, CheckpointError
from moa_drafter.pretrained import checkpoint_of, offered_names, shipped_checkpoint, shipped_names
from moa_drafter.training.settings import checked
from moa_runtime.options import DEFAULT_DRAFTER, DRAFTERS, drafter_option
from moa_runtime.paths import bundle_of_drafter
from support.refusals import refused


@pytest.mark.parametrize("name", shipped_names())
def test_the_package_holds_the_drafter_of_each_name(name):
    config, default = (load_checkpoint(shipped_checkpoint(each)).config for each in (name, DEFAULT_DRAFTER))
    assert config.architecture == DRAFTERS[name].architecture and (shipped_checkpoint(name) / "README.md").is_file()
    assert config.target_fingerprint == default.target_fingerprint, "one target for all"


def test_the_default_drafter_is_shipped():
    assert shipped_names()[0] == DEFAULT_DRAFTER and checkpoint_of(None) == shipped_checkpoint()
    assert {*offered_names()} == {*shipped_names(), *(name for name, kind in DRAFTERS.items() if not kind.has_graph)}


def test_a_word_is_a_shipped_name_first(tiny_shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("moa", "run"):
        (tmp_path / name).mkdir()
    assert shipped_names() == ("moa", "early-exit", "independent")
    assert checkpoint_of("moa") == tiny_shipped / "moa" and checkpoint_of("early-exit") == tiny_shipped / "early-exit"
    assert checkpoint_of("./moa") == checkpoint_of(Path("moa")) == Path("moa")
    assert checkpoint_of("~/none") == checkpoint_of(Path("~/none")) == Path.home() / "none"
    assert checkpoint_of("run") == Path("run") and checkpoint_of("./run/none") == Path("./run/none")
    assert checked({"init": "early-exit"})["init"] == tiny_shipped / "early-exit"


def test_a_drafter_that_is_not_shipped_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("moa_drafter.pretrained.WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights" / "moa").mkdir(parents=True)
    (tmp_path / "weights" / "moa" / CONFIG_FILE).touch()
    (tmp_path / "independent").mkdir()
    for word in ("early-exit", "independent", "sssd", "larn"):
        with refused("unknown_drafter", CheckpointError) as caught:
            checkpoint_of(word)
        assert word in str(caught.value) and ("./independent" in str(caught.value)) == (word == "independent")
    with refused("unknown_drafter"):
        checked({"init": "larn"})


def test_each_other_graph_has_a_bundle_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    default = tmp_path / "bundles" / "default"
    assert [bundle_of_drafter(name) for name in (None, "moa", "sssd")] == [default] * 3
    for name in ("early-exit", "independent"):
        assert bundle_of_drafter(name) == default.with_name(name) and drafter_option(name) == ("--drafter", name)
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "mine"))
    assert bundle_of_drafter("moa") == tmp_path / "mine"
    assert bundle_of_drafter("early-exit") == default.with_name("early-exit")
