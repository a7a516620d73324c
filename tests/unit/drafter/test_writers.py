"""Writers of conversations; all but the decoding is the same for each."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from moa_drafter.target import Target
from moa_drafter.training import generation
from moa_drafter.training.data import read_conversations
from moa_drafter.training.generation import Sampled, TransformersDecoder, answer_greedily, generate_conversations
from moa_drafter.training.settings import GenerateSettings, for_writer
from moa_drafter.vllm_environment import Installed
from moa_runtime.bundle import sha256_of
from support.drafter.training_data import moa_train

WRITING = ["--dtype", "float32", "--write-batch", 4, "--answer-tokens", 8, "--write-only"]


class Scribe:
    """A decoder whose texts are drawn from the batch's seed; it records its calls."""

    name = "vllm"

    def __init__(self, target: Target, *, fails: bool = False) -> None:
        self.target, self.fails = target, fails
        self.seeds: list[int] = []
        self.asked: list[list[Sampled | None]] = []
        self._random = random.Random()

    def begin(self, seed: int) -> None:
        self.seeds.append(seed)
        self._random.seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        self.asked.append(list(ways))
        stop = self.target.stop_tokens[0]
        texts = [[*(self._random.randrange(40, 400) for _ in range(new_tokens - 1)), stop] for _ in prompts]
        return [[] if self.fails and index % 2 else text for index, text in enumerate(texts)]

    def close(self) -> None:
        pass


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(12)))
    return file


@pytest.fixture
def vllm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_is_there", lambda: True)
    monkeypatch.setattr("moa_drafter.vllm_environment.installed", lambda: Installed("0.32.0", "cpu"))


def test_each_batch_follows_from_its_seed_whatever_writes(target: Target, tmp_path: Path) -> None:
    settings = GenerateSettings(conversations=20, write_batch=8, prompt_tokens=12, answer_tokens=16, seed=3)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    first = Scribe(target)
    assert generate_conversations(first, whole, settings, report=lambda held: None)
    assert first.seeds == [3 * 1_000_003 + batch for batch in (1, 2, 3)]
    messages, answers = first.asked[:2]
    assert messages == [Sampled(1.0, 1.0, 0.02)] * 8, "vLLM's own defaults"
    assert answers == [Sampled(0.8)] * 2 + [None] * 6, "a quarter is sampled, in the same call"
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(line for line in lines if json.loads(line)["b"] == 1) + lines[-1][:9])
    second = Scribe(target)
    assert generate_conversations(second, cut, settings, report=lambda held: None)
    assert second.seeds == first.seeds[1:] and cut.read_text() == whole.read_text()


def test_an_empty_text_is_no_conversation(target: Target, tmp_path: Path, prompts: Path) -> None:
    store = tmp_path / "tokens.jsonl"
    settings = GenerateSettings(conversations=6, write_batch=4, answer_tokens=8, prompt_tokens=8)
    scribe = Scribe(target, fails=True)
    assert generate_conversations(scribe, store, settings, prompts=prompts, report=lambda held: None)
    assert len(scribe.seeds) == 3 and len(read_conversations(store, vocab_size=512)) == 6
    assert generate_conversations(scribe, tmp_path / "own.jsonl", settings, report=lambda held: None)


def test_transformers_writes_each_text_as_it_is_asked_to(target: Target) -> None:
    texts = [target.tokenizer(text)["input_ids"] for text in ("the river", "and", "a fox who lived", "bread")]
    greedy = answer_greedily(target, texts, 12)
    decoder = TransformersDecoder(target)
    decoder.begin(5)
    ways = [None, Sampled(3.0), None, Sampled(3.0, min_p=1.0)]
    found = decoder.write(texts, 12, ways)
    assert [found[0], found[2], found[3]] == [greedy[0], greedy[2], greedy[3]], "min_p of 1 leaves the likeliest alone"
    assert found[1] != greedy[1]
    decoder.begin(5)
    assert decoder.write(texts, 12, ways) == found


@pytest.mark.parametrize(("device", "writer", "batch"), [("cpu", "vllm", 256), ("cuda:1", "transformers", 64)])
def test_auto_is_vllm_where_it_is_installed_for_the_device(
    vllm_here: None, device: str, writer: str, batch: int
) -> None:
    found = generation.resolve_writer(GenerateSettings(prompt_top_p=0.9), device)
    assert (found.writer, found.write_batch, found.prompt_top_p) == (writer, batch, 0.9)
    assert generation.resolve_writer(GenerateSettings(writer="transformers"), device).prompt_min_p == 0


def test_vllm_that_is_not_installed_is_refused(
    tiny_target: Path, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", tiny_target, "--prompts", prompts, "--writer"]
    for writer, task, code in (
        ("vllm", "--write-only", "not_installed"),
        ("vllm", "--dry-run", "not_installed"),
        ("abacus", "--write-only", "out_of_range"),
    ):
        assert moa_train(tmp_path / "run", *flags, writer, task) == 2
        printed = capsys.readouterr()
        assert f"[{code}]" in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_writer_and_its_defaults(
    vllm_here: None, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moa_train(tmp_path / "run", "--model", tiny_target, "--dtype", "float32", "--dry-run", "--json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    keys = ("writer", "write_batch", "prompt_top_p", "prompt_min_p")
    assert [settings[key] for key in keys] == ["vllm", 256, 1.0, 0.02]


def test_a_run_keeps_its_writer(
    vllm_here: None, tiny_target: Path, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also that of an earlier version, whose record names none."""
    out = tmp_path / "run"
    flags = ["--model", tiny_target, "--prompts", prompts, *WRITING]
    assert moa_train(out, *flags, "--writer", "transformers", "--conversations", 4) == 0
    record = yaml.safe_load((out / "training.yaml").read_text())
    for key in ("writer", "prompt_min_p"):
        del record["settings"][key]
    (out / "training.yaml").write_text(yaml.safe_dump({"settings": {**record["settings"], "conversations": 8}}))
    capsys.readouterr()
    assert moa_train(out, "--resume", "--write-only", "--writer", "auto", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["writer"], result["conversations"]) == ("transformers", 8)
    assert moa_train(out, *flags, "--conversations", 9) == 0
    assert moa_train(out, *flags, "--conversations", 12, "--writer", "vllm") == 2
    assert "[settings_differ]" in capsys.readouterr().err


def test_written_conversations_have_a_card(
    tiny_target: Path, target: Target, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    flags = ["--model", tiny_target, "--prompts", prompts, *WRITING, "--conversations", 12, "--json"]
    assert moa_train(out, *flags) == 0
    kept = Path(json.loads(capsys.readouterr().out)["kept"])
    card = yaml.safe_load((out / "conversations.jsonl.gz.card.yaml").read_text())
    assert gzip.decompress(kept.read_bytes()) == (out / "conversations.jsonl").read_bytes()
    assert (card["sha256"], card["bytes"]) == (sha256_of(kept), kept.stat().st_size)
    conversations = read_conversations(kept, vocab_size=512)
    assert card["conversations"] == 12 and card["answer_tokens"] == sum(len(c.answer) for c in conversations)
    assert card["other_tokens"] == sum(len(c.prompt) for c in conversations)
    assert card["target"]["fingerprint"] == target.fingerprint
    assert card["settings"]["prompts"] == "prompts.jsonl" and card["settings"]["writer"] == "transformers"
    before = kept.read_bytes()
    assert moa_train(out, *flags) == 0 and kept.read_bytes() == before

    training = ["--model", tiny_target, "--data", kept, "--dtype", "float32", "--dry-run", "--json"]
    capsys.readouterr()
    assert moa_train(tmp_path / "other", *training) == 0
    assert json.loads(capsys.readouterr().out)["data"]["files"][0]["sha256"] == card["sha256"]
    kept.write_bytes(gzip.compress(b"".join((out / "conversations.jsonl").read_bytes().splitlines(keepends=True)[1:])))
    assert moa_train(tmp_path / "other", *training) == 2
    assert "[bad_digest]" in capsys.readouterr().err


def test_a_writers_defaults_are_filled_in_once() -> None:
    filled = for_writer(GenerateSettings(write_batch=7), "vllm")
    assert (filled.write_batch, filled.prompt_top_p, filled.prompt_min_p) == (7, 1.0, 0.02)
    assert for_writer(filled, "transformers").prompt_min_p == 0.02
