"""Drafters by name: which there are, and what a user's word means."""

from __future__ import annotations

from pathlib import Path

import pytest

from moa_drafter.architectures.registry import drafter_of
from moa_drafter.config import CONFIG_FILE, WEIGHTS_FILE, CheckpointError
from moa_drafter.pretrained import checkpoint_of, offered_names, shipped_checkpoint, shipped_names
from moa_drafter.training.settings import checked
from moa_runtime.errors import MoaError
from moa_runtime.options import DEFAULT_DRAFTER, DRAFTERS, drafter_option
from moa_runtime.paths import bundle_of_drafter


@pytest.mark.parametrize("name", shipped_names())
def test_the_package_holds_what_its_name_says(name):
    folder = shipped_checkpoint(name)
    drafter = drafter_of((folder / CONFIG_FILE).read_text())
    assert drafter.config.architecture == DRAFTERS[name].architecture
    assert (folder / WEIGHTS_FILE).stat().st_size > 1e6 and (folder / "README.md").is_file()
    default = drafter_of((shipped_checkpoint() / CONFIG_FILE).read_text())
    assert drafter.config.target_fingerprint == default.config.target_fingerprint, "one target for all"


def test_the_default_one_is_shipped():
    assert shipped_names()[0] == DEFAULT_DRAFTER and checkpoint_of(None) == shipped_checkpoint()
    assert {*offered_names()} == {*shipped_names(), "sssd"}


def test_a_word_is_a_shipped_name_first(tiny_shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("moa", "run"):
        (tmp_path / name).mkdir()
    assert shipped_names() == ("moa", "early-exit", "independent")
    assert checkpoint_of("moa") == tiny_shipped / "moa" and checkpoint_of("early-exit") == tiny_shipped / "early-exit"
    assert checkpoint_of("./moa") == checkpoint_of(Path("moa")) == Path("moa")
    assert checkpoint_of("run") == Path("run") and checkpoint_of("run/none") == Path("run/none")


def test_what_is_not_shipped_is_a_sentence_with_what_is(tmp_path, monkeypatch):
    monkeypatch.setattr("moa_drafter.pretrained.WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights" / "moa").mkdir(parents=True)
    (tmp_path / "weights" / "moa" / CONFIG_FILE).touch()
    (tmp_path / "independent").mkdir()
    for word, said in (
        ("early-exit", "there are no weights of a drafter early-exit: shipped are moa"),
        ("independent", "there are no weights of a drafter independent: shipped are moa (the folder is ./independent)"),
        ("sssd", "there are no weights of a drafter sssd: shipped are moa"),
        ("larn", "there is no checkpoint folder larn, nor a drafter of that name: shipped are moa"),
    ):
        with pytest.raises(CheckpointError) as refused:
            checkpoint_of(word)
        assert str(refused.value) == said


def test_training_goes_on_from_a_name(tiny_shipped):
    assert checked({"init": "early-exit"})["init"] == tiny_shipped / "early-exit"
    with pytest.raises(MoaError, match="nor a drafter of that name"):
        checked({"init": "larn"})


def test_each_other_graph_has_a_bundle_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    default = tmp_path / "bundles" / "default"
    assert [bundle_of_drafter(name) for name in (None, "moa", "sssd")] == [default] * 3
    for name in ("early-exit", "independent"):
        assert bundle_of_drafter(name) == default.with_name(name) and drafter_option(name) == ("--drafter", name)
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "mine"))
    assert bundle_of_drafter("moa") == tmp_path / "mine" and bundle_of_drafter("early-exit") == default.with_name(
        "early-exit"
    )
