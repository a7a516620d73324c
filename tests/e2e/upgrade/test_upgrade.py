"""Programs and files of commit 9bb5272 with those of this version."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.upgrade.conftest import Version, ready
from moa_chat.desktop.profile import Profile

QUESTION = "Name three colours."


@contextlib.contextmanager
def serving(version: Version, left: Path, *options: object) -> Iterator[str]:
    """The address of a verifier."""
    models = ("--model", left / "target", "--drafter", left / "drafter")
    command = version.command("moa_server.cli", *models, "--json", "--port", 0, "--threads", 1, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=version.environment) as process:
        try:
            yield str(ready(process)["url"])
        finally:
            process.kill()


def ask(version: Version, left: Path, url: str, *options: object) -> dict[str, object]:
    """One answer, drafted by the device."""
    where = ("--server", url, "--bundle", left / "bundle", "--threads", 1, "--max-new-tokens", 24)
    how = ("--drafting", "device", "--temperature", 0, "--json")
    command = version.command("moa_chat.cli", *where, *how, *options, "--once", QUESTION)
    return dict(json.loads(version.run(command)))


@pytest.fixture(scope="module")
def answer(earlier: Version, left: Path) -> str:
    """What the earlier version answers by itself."""
    with serving(earlier, left) as url:
        return str(ask(earlier, left, url)["text"])


def test_an_earlier_client_and_this_verifier(earlier, now, left, answer, tmp_path):
    printed = earlier.run(earlier.command("moa_server.cli", "--new-token", "phone")).splitlines()
    token, entry = (line.split(": ", 1)[1] for line in printed[:2])
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": [json.loads(entry)]}))
    with serving(now, left, "--token-file", tmp_path / "tokens.json") as url:
        assert ask(earlier, left, url, f"--token={token}")["text"] == answer != ""


def test_this_client_with_an_earlier_verifier_and_bundle(earlier, now, left, answer):
    with serving(earlier, left) as url:
        told = ask(now, left, url)
    assert told["text"] == answer


def test_a_chat_that_an_earlier_version_kept_goes_on(earlier, now, left, tmp_path):
    """Its session's snapshot is in the file: the verifier of this version continues the conversation."""

    def talk(version: Version, url: str, question: str) -> dict[str, object]:
        where = ("--server", url, "--bundle", left / "bundle", "--threads", 1, "--max-new-tokens", 24)
        command = version.command("moa_chat.cli", "--terminal", "--chat", tmp_path / "chat.json", *where)
        version.run(command, stdin=question + "\n")
        return dict(json.loads((tmp_path / "chat.json").read_text()))

    with serving(now, left) as url:
        first = talk(earlier, url, QUESTION)
        second = talk(now, url, "And now?")
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant"] * 2
    assert second["messages"][:2] == first["messages"] and first["messages"][1]["content"]
    assert second["ends"][0] == first["ends"][0] and second["session_id"] == first["session_id"]


def test_an_earlier_windows_settings(left):
    loaded = Profile(left / "profile").load()
    stored = json.loads((left / "settings.json").read_text())
    assert stored["max_new_tokens"] == 77
    kept = {name: getattr(loaded, name) for name in stored if hasattr(loaded, name)}
    assert kept == {name: stored[name] for name in kept}
    assert set(stored) - set(kept) <= {"earlier_chats"}


def test_an_interrupted_training_run_of_an_earlier_version(earlier, now, left, tmp_path):
    def train(version: Version, *options: object) -> dict[str, object]:
        command = version.command("moa_drafter.cli", "--out", tmp_path / "run", "--json", *options)
        return dict(json.loads(version.run(command)))

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(24)))
    (tmp_path / "run.yaml").write_text(
        f"model: {left / 'target'}\nprompts: {prompts}\nconversations: 16\nwrite_batch: 8\nanswer_tokens: 16\n"
        "steps: 4\nstep_tokens: 160\naccumulate: 2\ndraft_vocab: 384\nlsa_layers: 2\nheld_out: 3\n"
        "warmup_steps: 2\ndtype: float32\nfeatures: live\nwriter: transformers\n"
    )
    assert train(earlier, "--config", tmp_path / "run.yaml", "--write-only")["conversations"] == 16
    paused = train(earlier, "--resume", "--pause-after", 1e-9)
    assert (paused["finished"], paused["step"]) == (False, 1)
    done = train(now, "--resume")
    assert (done["finished"], done["step"]) == (True, 4)
