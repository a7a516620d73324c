"""Every knob of a run, once: the flags of ``moa-train``, the keys of its configuration file and their defaults.

This module imports no torch, so that ``moa-train --help`` answers at once.
"""

# ruff: noqa: RUF009 - knob() is a field() with its limits
from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

DEFAULT_STEPS = 3000
DEFAULT_CONVERSATIONS = 2000
DEFAULT_DRAFT_VOCAB = 16384
DEFAULT_LSA_LAYERS = 6
#: What a user's message may be about, and how often, where the target writes the messages too.
DEFAULT_MIX = {
    "open": 4.0,
    "chat": 2.0,
    "code": 2.0,
    "maths": 2.0,
    "summary": 1.0,
    "passage": 1.0,
    "translation": 1.0,
    "extraction": 1.0,
    "rewriting": 1.0,
}
#: What may run the target where it writes, and what it does where nothing else is asked for: batches that take about
#: as long with each, and messages of the user without improbable tokens. Top-p would sort the vocabulary in each of
#: vLLM's steps, for every conversation.
WRITERS: dict[str, dict[str, Any]] = {
    "transformers": {"write_batch": 64, "prompt_top_p": 0.98, "prompt_min_p": 0.0},
    "vllm": {"write_batch": 256, "prompt_top_p": 1.0, "prompt_min_p": 0.02},
}


def knob(
    default: Any,
    text: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with what ``--help`` says of it, and the range it is checked against."""
    limits = {"help": text, "above": above, "least": least, "most": most, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=limits)
    return field(default=default, metadata=limits)


def _left_to_writer(text: str, key: str) -> str:
    return f"{text} (default {WRITERS['transformers'][key]}, with vllm {WRITERS['vllm'][key]})"


@dataclass(frozen=True)
class TrainSettings:
    """The training loop. Sizes are in tokens, ``steps`` in optimiser steps; a ``steps`` of 0 is not fixed yet."""

    steps: int = knob(0, f"optimiser steps (default {DEFAULT_STEPS}, unless minutes are given)", above=0)
    step_tokens: int = knob(640, "tokens of one step, prompts counted", above=0)
    accumulate: int = knob(1, "micro-batches that one step is cut into", above=0)
    learning_rate: float = knob(5e-4, "highest rate", above=0)
    final_learning_rate: float = knob(2e-5, "rate at the end of the cosine", least=0)
    warmup_steps: int = knob(60, "steps of linear warm-up", least=0)
    weight_decay: float = knob(0.01, "of matrices; vectors have none", least=0)
    ema_decay: float = knob(
        0.0, "exponential moving average of the weights, which is what is saved; 0: none", least=0, most=0.99999
    )
    optimizer: str = knob("adamw", "adamw, or muon: fewer steps, each dearer without bfloat16 units")
    loss: str = knob("kl", "what is made small: kl, feature, acceptance")
    curriculum: str = knob(
        "auto",
        "short futures first (full), or long ones at once (none); auto: none with init",
        choices=("auto", "full", "none"),
    )
    future_high: int | None = knob(
        None, "highest ordinary future length of the last stage (default: the stage's)", above=0
    )
    long_share: float | None = knob(
        None, "share of long futures in the last stage (default: the stage's)", least=0, most=1
    )
    longest_future: int | None = knob(None, "highest of the long future lengths (default: the stage's)", above=0)
    no_rows_share: float | None = knob(None, "share that is trained without recent memory rows", least=0, most=1)
    dtype: str = knob("auto", "of the forward pass; auto: measured", choices=("auto", "float32", "bfloat16"))
    compile: bool = knob(False, "torch.compile the drafter's forward and backward")
    seed: int = knob(0, "fixes data order, initial weights, masks and what is sampled", least=0, most=2**63 - 1)
    save_every: int = knob(250, "steps between checkpoints", above=0)
    evaluate_every: int = knob(500, "steps between evaluations", above=0)


@dataclass(frozen=True)
class GenerateSettings:
    """What the target writes. Lengths are in tokens; ``sampled_share`` of the answers are sampled at
    ``temperature``, the others are greedy. What is None is left to the writer, see :func:`for_writer`."""

    conversations: int | None = knob(
        None, f"how many to write, or to use of data (default {DEFAULT_CONVERSATIONS}, all)", above=0
    )
    writer: str = knob(
        "auto",
        "what runs the target where it writes: transformers, or vllm; auto: vllm where it is installed for the device",
        choices=("auto", *WRITERS),
    )
    write_batch: int | None = knob(None, _left_to_writer("conversations written at once", "write_batch"), above=0)
    prompt_tokens: int = knob(96, "longest message of the user, where the target writes it", above=1)
    answer_tokens: int = knob(176, "longest answer", above=1)
    longest_prompt: int = knob(448, "longest text before an answer", above=1)
    prompt_temperature: float = knob(1.0, "of the user's messages", above=0)
    prompt_top_p: float | None = knob(
        None, _left_to_writer("of the user's messages; below 1 it is slow with vllm", "prompt_top_p"), above=0, most=1
    )
    prompt_min_p: float | None = knob(
        None,
        _left_to_writer(
            "least probability in the user's messages, as a share of the likeliest token's", "prompt_min_p"
        ),
        least=0,
        most=1,
    )
    sampled_share: float = knob(0.25, "share of answers that are sampled", least=0, most=1)
    temperature: float = knob(0.8, "of sampled answers", above=0)
    follow_up_share: float = knob(
        0.15, "share of conversations whose user asks again, where the target writes both", least=0, most=1
    )
    mix: dict[str, float] = knob(DEFAULT_MIX, "weights of the kinds of message, as kind=weight")
    seed: int = knob(0, "")  # TrainSettings has the text


SettingsT = TypeVar("SettingsT", bound=GenerateSettings)


def for_writer(settings: SettingsT, writer: str) -> SettingsT:
    """The settings with ``writer``, and its own values where they leave something to it."""
    left = {key: value for key, value in WRITERS[writer].items() if getattr(settings, key) is None}
    return replace(settings, writer=writer, **left)


@dataclass(frozen=True)
class RunSettings(TrainSettings, GenerateSettings):
    """One run from the first prompt to the last step.

    Without ``data`` the target first writes ``conversations``. ``init`` is a checkpoint to train on, instead
    of starting from the target's weights; it keeps its architecture, draft vocabulary and the layers that it sees.
    """

    model: str | None = knob(None, "target: the built-in default, a folder, a .gguf file, or a Hub id")
    arch: str = knob("moa", "architecture: moa, eagle, early-exit, independent")
    data: tuple[Path, ...] = knob((), "token stores (JSON lines of {p, r} token ids, .gz too)")
    prompts: Path | None = knob(None, "JSON lines of prompts for the target to answer, .gz too")
    init: Path | None = knob(None, "a checkpoint to train on, with longer futures: a folder, or a shipped one's name")
    minutes: float | None = knob(
        None,
        "train for about this long instead of steps; without data or conversations, half of it to write",
        above=0,
        most=1_000_000,
    )
    draft_vocab: int | None = knob(
        None, f"tokens that can be drafted (default {DEFAULT_DRAFT_VOCAB}; with init, that checkpoint's)", above=0
    )
    lsa_layers: int | None = knob(
        None,
        f"target layers that the layer self-attention sees, of moa alone (default {DEFAULT_LSA_LAYERS}; with init, "
        "that checkpoint's)",
        above=0,
    )
    target_layers: int = knob(0, "the target's last layers inside the drafter (TLI); with init 0: as it has", least=0)
    train_target_layers: bool = knob(False, "train these layers too, as copies in the checkpoint")
    held_out: int | None = knob(None, "conversations for evaluation only (default 48, at most a fifth)", above=0)
    longest: int = knob(448, "longer conversations are left out, in tokens", above=1)
    features: str = knob(
        "auto", "target's states: kept on disk, or computed anew; auto: live on cuda", choices=("auto", "disk", "live")
    )
