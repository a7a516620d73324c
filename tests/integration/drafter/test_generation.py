"""Texts that the target writes for training: writers, kinds of message, several turns, pauses."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import yaml

from moa_drafter.training import generation
from moa_drafter.training.data import read_conversations
from moa_drafter.training.generation import (
    OPENINGS,
    Sampled,
    TransformersDecoder,
    answer_greedily,
    draw_openings,
    generate_conversations,
    read_prompts,
)
from moa_drafter.training.settings import DEFAULT_MIX, GenerateSettings, for_writer
from moa_drafter.vllm_environment import Installed
from moa_runtime.checked_file import sha256_of


def write(target, store, settings, report, **options):
    return generate_conversations(TransformersDecoder(target), store, settings, report=report, **options)


def test_every_turn_of_given_prompts_is_answered(target, tmp_path):
    prompts, store = tmp_path / "prompts.jsonl.gz", tmp_path / "tokens.jsonl"
    users = [["the river", "and the fox", "why"], ["one"], ["a bottle", "bread"]]
    with gzip.open(prompts, "wt") as file:
        for texts in users:
            file.write(json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}) + "\n")
    settings = GenerateSettings(conversations=3, write_batch=3, answer_tokens=12, sampled_share=0)
    assert write(target, store, settings, lambda held: None, prompts=prompts)
    found = read_conversations(store, vocab_size=512)
    assert sorted(len(c.answers) for c in found) == [1, 2, 3]
    decode, model, stop = target.tokenizer.decode, target.model, target.stop_tokens[0]
    for conversation in found:
        tokens = conversation.tokens
        (texts,) = [texts for texts in users if len(texts) == len(conversation.answers)]
        assert all(text in decode(tokens) for text in texts)
        for start, stop_at in conversation.answers:
            before = torch.tensor([tokens[:start]])
            answer = model.generate(input_ids=before, max_new_tokens=12, do_sample=False, eos_token_id=stop)[0, start:]
            assert list(tokens[start:stop_at]) == answer.tolist(), "the target's greedy answer to everything before"
            text = decode(tokens[:start])
            assert text.endswith("<|im_start|>assistant\n")
            assert text.count("<|im_end|>\n<|im_start|>user\n") == text.count("<|im_start|>user\n")


def test_out_of_time_a_few_are_still_written(target, tmp_path, prompts):
    """Batches of four: after the third there are the ten that can be trained on."""
    settings, held = GenerateSettings(conversations=40, write_batch=4, answer_tokens=4), []
    arguments = target, tmp_path / "tokens.jsonl", settings, held.append
    assert not write(*arguments, prompts=prompts, until=0.0, few_from=0.0) and held == [0]
    assert not write(*arguments, prompts=prompts, few_from=0.0) and held == [0, 0, 4, 8, 12]
    assert not write(*arguments, prompts=prompts, few_from=0.0) and held[-1] == 12


def test_prompts_of_like_length_are_answered_together(tmp_path):
    rng = random.Random(0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * rng.randrange(1, 500)}) + "\n" for _ in range(100)))
    batches = read_prompts(prompts, 10)
    assert sum(map(len, batches)) == 100
    lengths = [[len(turns[0]) for turns in batch] for batch in batches]
    assert all(max(one) <= min(two) for one, two in itertools.pairwise(sorted(lengths)))
    assert lengths != sorted(lengths), "a run that stops early must not have seen the short ones alone"
    assert read_prompts(prompts, 10) == batches


def test_the_mix_draws_its_kinds():
    assert set(DEFAULT_MIX) == set(OPENINGS)
    drawn = draw_openings({"code": 3, "maths": 1, "chat": 0}, 4000, random.Random(0))
    assert 2800 < sum(opening in OPENINGS["code"] for opening in drawn) < 3200 and not {*drawn} & {*OPENINGS["chat"]}


def test_the_target_asks_again(target, tmp_path, monkeypatch):
    # The tiny target's own messages hardly ever end.
    monkeypatch.setattr(generation._Writer, "_messages", lambda self, prompts: ["and the river"] * len(prompts))
    settings = GenerateSettings(conversations=8, write_batch=8, answer_tokens=8, follow_up_share=1.0)
    write(target, tmp_path / "tokens.jsonl", settings, lambda held: None)
    found = read_conversations(tmp_path / "tokens.jsonl", vocab_size=512)
    twice = [conversation for conversation in found if len(conversation.answers) == 2]
    assert len(twice) >= 6, "an answer that repeats itself ends a conversation"
    for conversation in twice:
        asked = target.tokenizer.decode(conversation.tokens[: conversation.answers[1][0]])
        assert asked.endswith("<|im_end|>\n<|im_start|>user\nand the river<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_writing_pauses_and_continues_exactly(tiny_target, tmp_path, train):
    flags = [
        "--model",
        tiny_target,
        "--dtype",
        "float32",
        "--conversations",
        9,
        "--write-batch",
        8,
        "--prompt-tokens",
        48,
    ]
    flags += ["--prompt-temperature", 2, "--answer-tokens", 8, "--mix", "open=1", "chat=1"]
    train("whole", *flags, "--write-only")
    assert train("cut", *flags, "--write-only", "--pause-after", 1e-9)["finished"] is False
    result = train("cut", "--resume", "--write-only")
    assert result["finished"] is True and result["conversations"] == 9
    one, other = ((tmp_path / run / "conversations.jsonl").read_text() for run in ("cut", "whole"))
    assert one == other
    train("cut", *flags, "--temperature", 0.3, code="settings_differ")


WRITING = ["--dtype", "float32", "--write-batch", 4, "--answer-tokens", 8, "--write-only"]


class Scribe:
    """A decoder whose texts are drawn from the batch's seed; it records its calls."""

    name = "vllm"

    def __init__(self, target, *, fails=False):
        self.target, self.fails = target, fails
        self.seeds, self.asked = [], []
        self._random = random.Random()

    def begin(self, seed):
        self.seeds.append(seed)
        self._random.seed(seed)

    def write(self, prompts, new_tokens, ways):
        self.asked.append(list(ways))
        stop = self.target.stop_tokens[0]
        texts = [[*(self._random.randrange(40, 400) for _ in range(new_tokens - 1)), stop] for _ in prompts]
        return [[] if self.fails and index % 2 else text for index, text in enumerate(texts)]


@pytest.fixture
def vllm_here(monkeypatch):
    monkeypatch.setattr(generation, "_is_there", lambda: True)
    monkeypatch.setattr("moa_drafter.vllm_environment.installed", lambda: Installed("0.32.0", "cpu"))


def test_each_batch_follows_from_its_seed_whatever_writes(target, tmp_path):
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


def test_an_empty_text_is_no_conversation(target, tmp_path, prompts):
    store = tmp_path / "tokens.jsonl"
    settings = GenerateSettings(conversations=6, write_batch=4, answer_tokens=8, prompt_tokens=8)
    scribe = Scribe(target, fails=True)
    assert generate_conversations(scribe, store, settings, prompts=prompts, report=lambda held: None)
    assert len(scribe.seeds) == 3 and len(read_conversations(store, vocab_size=512)) == 6
    assert generate_conversations(scribe, tmp_path / "own.jsonl", settings, report=lambda held: None)


def test_transformers_writes_each_text_as_it_is_asked_to(target):
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
def test_auto_is_vllm_if_it_is_installed_for_the_device(vllm_here, device, writer, batch):
    found = generation.resolve_writer(GenerateSettings(prompt_top_p=0.9), device)
    assert (found.writer, found.write_batch, found.prompt_top_p) == (writer, batch, 0.9)
    assert for_writer(found, "transformers").prompt_min_p == found.prompt_min_p, "defaults are filled in once"


def test_vllm_that_is_not_installed_is_refused(tiny_target, tmp_path, prompts, train):
    flags = ["--model", tiny_target, "--prompts", prompts, "--writer"]
    for arguments, code in (
        (("vllm", "--write-only"), "not_installed"),
        (("vllm", "--dry-run"), "not_installed"),
        (("abacus", "--write-only"), "out_of_range"),
    ):
        assert len(train("run", *flags, *arguments, code=code)) == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_writer_and_its_defaults(vllm_here, tiny_target, train):
    settings = train("run", "--model", tiny_target, "--dtype", "float32", "--dry-run")["settings"]
    keys = ("writer", "write_batch", "prompt_top_p", "prompt_min_p")
    assert [settings[key] for key in keys] == ["vllm", 256, 1.0, 0.02]


def test_a_run_keeps_its_writer(vllm_here, tiny_target, tmp_path, prompts, train):
    """Also that of an earlier version, whose record names none."""
    flags, file = ["--model", tiny_target, "--prompts", prompts, *WRITING], tmp_path / "run" / "training.yaml"
    train("run", *flags, "--writer", "transformers", "--conversations", 4)
    settings = yaml.safe_load(file.read_text())["settings"] | {"conversations": 8}
    del settings["writer"], settings["prompt_min_p"]
    file.write_text(yaml.safe_dump({"settings": settings}))
    result = train("run", "--resume", "--write-only", "--writer", "auto")
    assert (result["writer"], result["conversations"]) == ("transformers", 8)
    train("run", *flags, "--conversations", 9)
    train("run", *flags, "--conversations", 12, "--writer", "vllm", code="settings_differ")


def test_written_conversations_have_a_card(tiny_target, target, tmp_path, prompts, train):
    flags = ["--model", tiny_target, "--prompts", prompts, *WRITING, "--conversations", 12]
    kept, written = Path(train("run", *flags)["kept"]), tmp_path / "run" / "conversations.jsonl"
    card = yaml.safe_load(written.with_name("conversations.jsonl.gz.card.yaml").read_text())
    assert gzip.decompress(kept.read_bytes()) == written.read_bytes()
    assert (card["sha256"], card["bytes"]) == (sha256_of(kept), kept.stat().st_size)
    conversations = read_conversations(kept, vocab_size=512)
    assert card["conversations"] == 12 and card["answer_tokens"] == sum(len(c.answer) for c in conversations)
    assert card["other_tokens"] == sum(len(c.prompt) for c in conversations)
    assert card["target"]["fingerprint"] == target.fingerprint
    assert card["settings"]["prompts"] == "prompts.jsonl" and card["settings"]["writer"] == "transformers"
    before = kept.read_bytes()
    train("run", *flags)
    assert kept.read_bytes() == before

    training = ["--model", tiny_target, "--data", kept, "--dtype", "float32", "--dry-run"]
    assert train("other", *training)["data"]["files"][0]["sha256"] == card["sha256"]
    kept.write_bytes(gzip.compress(b"".join(written.read_bytes().splitlines(keepends=True)[1:])))
    train("other", *training, code="bad_digest")
