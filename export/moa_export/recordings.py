"""Real conversations as a device would see them: what exports are compared on.

Random inputs would flatter or slander a quantisation. So the target answers a fixed set of questions
greedily, and the drafter's server half makes memory rows of what it computed on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moa_drafter.checkpoint import DeviceDrafter
from moa_drafter.drafter import TokenDrafter
from moa_drafter.target import Target
from moa_drafter.target_features import target_states
from moa_drafter.training.decoding import answer_greedily
from moa_runtime.drafters.base import Float32
from moa_runtime.paths import cache_dir

ANSWER_TOKENS = 48
_BATCH = 12


@dataclass(frozen=True)
class Recording:
    """One conversation of one turn.

    Attributes:
        tokens: prompt and answer.
        prompt: how many of them come before the answer.
        keys, values: memory rows of all tokens, ``[n, kv_heads, head_dim]``; of none where the drafter reads none.
    """

    tokens: list[int]
    prompt: int
    keys: Float32
    values: Float32


@torch.no_grad()
def record(target: Target, drafter: DeviceDrafter, questions: Sequence[str]) -> list[Recording]:
    """Let the target answer, and make memory rows of the conversations."""
    recordings = []
    for prompt, answer in _conversations(target, questions):
        tokens = prompt + answer
        recordings.append(Recording(tokens, len(prompt), *_rows(target, drafter, tokens)))
    return recordings


def _rows(target: Target, drafter: DeviceDrafter, tokens: list[int]) -> tuple[Float32, Float32]:
    if isinstance(drafter, TokenDrafter):
        none = np.zeros((0, drafter.config.kv_heads, drafter.config.decoder.head_dim), np.float32)
        return none, none
    states = target_states(target, tokens, drafter.row_reads)
    keys, values = drafter.memory_rows(states.kv.float(), torch.arange(len(tokens)))
    return keys.numpy(), values.numpy()


def _conversations(target: Target, questions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer of each question; kept on disk, for they depend on the target alone."""
    apply = target.tokenizer.apply_chat_template
    prompts: list[list[int]] = [
        apply([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for text in questions
    ]
    identity = json.dumps([target.fingerprint, ANSWER_TOKENS, prompts])
    kept = cache_dir() / "answers" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if not kept.is_file():
        answers: list[list[int]] = []
        for start in range(0, len(prompts), _BATCH):
            answers += answer_greedily(target, prompts[start : start + _BATCH], ANSWER_TOKENS)
        _write_atomically(kept, json.dumps(answers))
    return list(zip(prompts, json.loads(kept.read_text()), strict=True))


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(text)
    scratch.replace(path)
