"""Fixtures of the drafter's tests."""

from __future__ import annotations

import json

import pytest

from moa_drafter.training import generation
from support.drafter.training_data import moa_train, small, write_store, write_tokens


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """Test without vLLM, even if it is installed."""
    monkeypatch.setattr(generation, "_is_there", lambda: False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A token store of 40 made-up conversations."""
    return write_store(tmp_path_factory.mktemp("store") / "tokens.jsonl", 40)


@pytest.fixture
def flags(tiny_target, store):
    """Flags of a run of seconds over ``store``."""
    return small(tiny_target, store)


@pytest.fixture(scope="module")
def tokens(target, tmp_path_factory):
    """Conversations that the tiny target wrote."""
    return write_tokens(target, tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def prompts(tmp_path):
    """A file of 40 prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(40)))
    return file


@pytest.fixture
def train(tmp_path, capsys):
    """Run ``moa-train`` in a folder of ``tmp_path``; return its result, or with a ``code`` the lines of its refusal."""

    def run(out, *arguments, code=None):
        status = moa_train(tmp_path / out, *arguments, "--json")
        printed = capsys.readouterr()
        if code is None:
            assert status == 0, printed.err
            return json.loads(printed.out)
        lines = printed.err.splitlines()
        assert status == 2 and f"[{code}]" in lines[-1] and "Traceback" not in printed.err and printed.out == ""
        return lines

    return run
