"""vLLM writes conversations: the target's own answers, each batch the same in every run, ready to train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa_drafter.target import load_target
from moa_drafter.training.data import read_conversations
from moa_drafter.training.generation import answer_greedily
from support.drafter.training_data import moa_train

SIZES = ["--write-batch", 8, "--prompt-tokens", 48, "--answer-tokens", 12, "--writer", "vllm"]


@pytest.mark.slow
def test_answers_are_the_targets_and_can_be_trained_on(paged_target: Path, tmp_path: Path, capsys) -> None:
    """A prompt longer than the context is left out; in float32 greedy answers are those of transformers."""
    prompts = tmp_path / "prompts.jsonl"
    users = [[f"the river {n}", "and the fox", "why"][: 1 + n % 3] for n in range(15)] + [["the fox and the " * 200]]
    lines = [json.dumps({"messages": [{"role": "user", "content": text} for text in says]}) for says in users]
    prompts.write_text("\n".join(lines) + "\n")
    sizes = ["--steps", 2, "--step-tokens", 128, "--draft-vocab", 384, "--lsa-layers", 2, "--warmup-steps", 1]
    flags = ["--model", paged_target, "--prompts", prompts, "--dtype", "float32", "--longest-prompt", 2000]
    sizes += ["--conversations", 15, "--sampled-share", 0]
    assert moa_train(tmp_path / "run", *flags, *SIZES, *sizes, "--json") == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["finished"] and result["tau"] >= 1 and "Traceback" not in said.err
    target = load_target(str(paged_target))
    found = read_conversations(tmp_path / "run/conversations.jsonl", vocab_size=512)
    assert len(found) == 15 and max(len(c.answers) for c in found) == 3
    for conversation in found:
        for start, stop in conversation.answers:
            (answer,) = answer_greedily(target, [conversation.tokens[:start]], 12)
            assert list(conversation.tokens[start:stop]) == answer


@pytest.mark.slow
def test_an_interruption_changes_nothing(paged_target: Path, tmp_path: Path, capsys) -> None:
    """In bfloat16, in which the texts beside one may change it."""
    flags = ["--model", paged_target, "--dtype", "bfloat16", "--conversations", 14, "--write-only"]
    own = ["--sampled-share", 0.5, "--prompt-temperature", 2, "--prompt-min-p", 0, "--follow-up-share", 1]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert moa_train(whole, *flags, *SIZES, *own, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["writer"], result["conversations"]) == ("vllm", 14)
    lines = (whole / "conversations.jsonl").read_text().splitlines(keepends=True)
    first = [line for line in lines if json.loads(line)["b"] == json.loads(lines[0])["b"]]
    assert len(first) < 14
    assert moa_train(cut, *flags, *SIZES, *own, "--pause-after", 1e-9) == 0
    (cut / "conversations.jsonl").write_text("".join(first) + lines[-1][:20])
    assert moa_train(cut, "--resume", "--write-only") == 0
    assert (cut / "conversations.jsonl").read_text() == "".join(lines)


@pytest.mark.slow
def test_it_writes_on_its_own_device_alone(paged_target: Path, monkeypatch, tmp_path: Path, capsys) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "xpu")
    assert moa_train(tmp_path / "run", "--model", paged_target, "--dtype", "float32", *SIZES, "--write-only") == 2
    assert "xpu" in capsys.readouterr().err
