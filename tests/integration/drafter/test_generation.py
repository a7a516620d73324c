"""Texts that the target writes for training: kinds of message, several turns, pauses."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from moa_drafter.target import Target
from moa_drafter.training import generation as generate
from moa_drafter.training.data import read_conversations
from moa_drafter.training.generation import (
    OPENINGS,
    TransformersDecoder,
    draw_openings,
    generate_conversations,
    read_prompts,
)
from moa_drafter.training.settings import DEFAULT_MIX, GenerateSettings
from support.drafter.training_data import moa_train


def test_every_turn_of_given_prompts_is_answered(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl.gz"
    users = [["the river", "and the fox", "why"], ["one"], ["a bottle", "bread"]]
    with gzip.open(prompts, "wt") as file:
        for says in users:
            messages = [{"role": "user", "content": text} for text in says]
            file.write(json.dumps({"messages": messages}) + "\n")
    store = tmp_path / "tokens.jsonl"
    settings = GenerateSettings(conversations=3, write_batch=3, answer_tokens=12, sampled_share=0)
    assert generate_conversations(
        TransformersDecoder(target), store, settings, prompts=prompts, report=lambda held: None
    )
    found = read_conversations(store, vocab_size=512)
    assert sorted(len(c.answers) for c in found) == [1, 2, 3]
    decode = target.tokenizer.decode
    stop = target.stop_tokens[0]
    for conversation in found:
        tokens = conversation.tokens
        said = decode(tokens)
        assert [text for says in users for text in says if len(says) == len(conversation.answers) and text in said]
        for start, stop_at in conversation.answers:
            assert decode(tokens[:start]).endswith("<|im_start|>assistant\n")
            answer = target.model.generate(
                input_ids=torch.tensor([tokens[:start]]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=stop,
            )[0, start:].tolist()
            assert list(tokens[start:stop_at]) == answer, "the target's greedy answer to all that stands before"
        for start, _ in conversation.answers[1:]:
            between = decode(tokens[:start])
            assert between.count("<|im_end|>\n<|im_start|>user\n") == between.count("<|im_start|>user\n")


def test_out_of_time_a_few_are_still_written(target: Target, tmp_path: Path) -> None:
    """Batches of four: after the third there are the ten that can be trained on."""
    prompts, store = tmp_path / "prompts.jsonl", tmp_path / "tokens.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(40)))
    settings = GenerateSettings(conversations=40, write_batch=4, answer_tokens=4)
    held: list[int] = []

    def write(**limits: float) -> bool:
        return generate_conversations(
            TransformersDecoder(target), store, settings, prompts=prompts, report=held.append, **limits
        )

    assert not write(until=0.0, few_from=0.0) and held == [0]
    assert not write(few_from=0.0) and held == [0, 0, 4, 8, 12]
    assert not write(few_from=0.0) and held[-1] == 12


def test_prompts_of_like_length_are_answered_together(tmp_path: Path) -> None:
    rng = random.Random(0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * rng.randrange(1, 500)}) + "\n" for _ in range(100)))
    batches = read_prompts(prompts, 10)
    assert sum(map(len, batches)) == 100
    lengths = [[len(turns[0]) for turns in batch] for batch in batches]
    assert all(max(one) <= min(two) for one, two in itertools.pairwise(sorted(lengths)))
    assert lengths != sorted(lengths), "a run that stops early must not have seen the short ones alone"
    assert read_prompts(prompts, 10) == batches


def test_the_mix_draws_its_kinds() -> None:
    assert set(DEFAULT_MIX) == set(OPENINGS)
    drawn = draw_openings({"code": 3, "maths": 1, "chat": 0}, 4000, random.Random(0))
    code = sum(opening in OPENINGS["code"] for opening in drawn)
    assert 2800 < code < 3200 and not any(opening in OPENINGS["chat"] for opening in drawn)


def test_the_target_asks_again(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny target's own messages hardly ever end.
    monkeypatch.setattr(generate._Writer, "_messages", lambda self, prompts: ["and the river"] * len(prompts))
    settings = GenerateSettings(conversations=8, write_batch=8, answer_tokens=8, follow_up_share=1.0)
    store = tmp_path / "tokens.jsonl"
    generate_conversations(TransformersDecoder(target), store, settings, report=lambda held: None)
    found = read_conversations(store, vocab_size=512)
    twice = [conversation for conversation in found if len(conversation.answers) == 2]
    assert len(twice) >= 6, "an answer that repeats itself ends a conversation"
    for conversation in twice:
        asked = target.tokenizer.decode(conversation.tokens[: conversation.answers[1][0]])
        assert asked.endswith("<|im_end|>\n<|im_start|>user\nand the river<|im_end|>\n<|im_start|>assistant\n")


def test_writing_pauses_and_continues_exactly(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", tiny_target, "--dtype", "float32", "--conversations", 9, "--write-batch", 8]
    sizes = ["--prompt-tokens", 48, "--prompt-temperature", 2, "--answer-tokens", 8, "--mix", "open=1", "chat=1"]
    assert moa_train(tmp_path / "whole", *flags, *sizes, "--write-only") == 0
    capsys.readouterr()
    cut = tmp_path / "cut"
    assert moa_train(cut, *flags, *sizes, "--write-only", "--pause-after", 1e-9, "--json") == 0
    assert json.loads(capsys.readouterr().out)["finished"] is False
    assert moa_train(cut, "--resume", "--write-only", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finished"] is True and result["conversations"] == 9
    assert (cut / "conversations.jsonl").read_text() == (tmp_path / "whole/conversations.jsonl").read_text()
    assert moa_train(cut, *flags, *sizes, "--temperature", 0.3) == 2
    assert "[settings_differ]" in capsys.readouterr().err
