"""Made-up conversations and runs of ``moa-train``, small enough for fast tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from moa_drafter.cli import main
from moa_drafter.target import Target
from moa_drafter.training.generation import TransformersDecoder, generate_conversations
from moa_drafter.training.settings import GenerateSettings


def write_store(path: Path, conversations: int, *, prompt: int = 8, answer: int = 24, seed: int = 0) -> Path:
    """A token store for the tiny target: counting texts, all of one length, which can be learnt fast."""
    rng = random.Random(seed)
    lines = []
    for _ in range(conversations):
        first, step = rng.randrange(3, 400), rng.randrange(1, 4)
        tokens = [3 + (first + step * i) % 400 for i in range(prompt + answer)]
        lines.append(json.dumps({"p": tokens[:prompt], "r": tokens[prompt:]}) + "\n")
    path.write_text("".join(lines))
    return path


def moa_train(out: Path, *arguments: str | Path | float) -> int:
    return main(["--out", str(out), *map(str, arguments)])


def small(target: Path, store: Path, steps: int = 6) -> list[str]:
    """Return flags of a run of seconds."""
    sizes = "--dtype float32 --step-tokens 128 --draft-vocab 384 --lsa-layers 2 --held-out 3 --warmup-steps 2"
    return ["--model", str(target), "--data", str(store), "--steps", str(steps), *sizes.split()]


def write_tokens(target: Target, folder: Path) -> Path:
    """Write a token file into ``folder``: the tiny target's answers to 48 random prompts."""
    rng = random.Random(0)
    words = ["the", "small", "model", "proposes", "tokens", "and", "a", "large", "one", "verifies", "them"]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": " ".join(rng.choices(words, k=6))}) + "\n" for _ in range(48)))
    store = folder / "tokens.jsonl"
    settings = GenerateSettings(conversations=40, write_batch=16, answer_tokens=32, sampled_share=0.5)
    generate_conversations(TransformersDecoder(target), store, settings, prompts=prompts, report=lambda held: None)
    return store


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Load the trained weights of a run in float32."""
    return torch.load(out / "training.pt", weights_only=True)["drafter"]


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)
