"""Settings of a run: flags of ``moa-train``, keys of its YAML file, their checks, and the record beside the weights.

Needs no torch, so that ``moa-train --help`` answers at once.
"""

# ruff: noqa: RUF009 - knob() is a field() with its limits
from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from moa_drafter.config import FIRST_LAYERS
from moa_drafter.pretrained import checkpoint_of
from moa_runtime.checked_file import read_checked_text
from moa_runtime.errors import MoaError

DEFAULT_STEPS = 3000
DEFAULT_CONVERSATIONS = 2000
DEFAULT_DRAFT_VOCAB = 16384
DEFAULT_LSA_LAYERS = 6
#: Weights of the kinds of user's messages that the target writes.
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
#: Programs that may run the target for writing, with their defaults: batches that take about equally long, and user's
#: messages without improbable tokens (top-p would sort the vocabulary for each token with vLLM).
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
    """Make a field with its text for ``--help`` and its range."""
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
    future_high: int | None = knob(None, "highest ordinary future length of the last stage", above=0)
    long_share: float | None = knob(None, "share of long futures in the last stage", least=0, most=1)
    longest_future: int | None = knob(None, "highest of the long future lengths", above=0)
    no_rows_share: float | None = knob(None, "share that is trained without recent memory rows", least=0, most=1)
    dtype: str = knob("auto", "of the forward pass; auto: measured", choices=("auto", "float32", "bfloat16"))
    compile: bool = knob(False, "torch.compile the drafter's forward and backward")
    seed: int = knob(0, "fixes data order, initial weights, masks and what is sampled", least=0, most=2**63 - 1)
    save_every: int = knob(250, "steps between checkpoints", above=0)
    evaluate_every: int = knob(500, "steps between evaluations", above=0)


@dataclass(frozen=True)
class GenerateSettings:
    """Settings of the texts that the target writes. Lengths are in tokens; ``sampled_share`` of the answers are sampled
    at ``temperature``, the others are greedy. None is the writer's own default, see :func:`for_writer`."""

    conversations: int | None = knob(
        None, f"number to write, or to use of data (default {DEFAULT_CONVERSATIONS}, all)", above=0
    )
    writer: str = knob(
        "auto",
        "program that runs the target for writing; auto: vllm if it is installed for the device",
        choices=("auto", *WRITERS),
    )
    write_batch: int | None = knob(None, _left_to_writer("conversations written at once", "write_batch"), above=0)
    prompt_tokens: int = knob(96, "longest message of the user that the target writes", above=1)
    answer_tokens: int = knob(176, "longest answer", above=1)
    longest_prompt: int = knob(448, "longest text before an answer", above=1)
    prompt_temperature: float = knob(1.0, "of the user's messages", above=0)
    prompt_top_p: float | None = knob(
        None, _left_to_writer("of the user's messages; slow with vllm", "prompt_top_p"), above=0, most=1
    )
    prompt_min_p: float | None = knob(
        None, _left_to_writer("of the user's messages, relative to the likeliest", "prompt_min_p"), least=0, most=1
    )
    sampled_share: float = knob(0.25, "share of answers that are sampled", least=0, most=1)
    temperature: float = knob(0.8, "of sampled answers", above=0)
    follow_up_share: float = knob(0.15, "share of written conversations whose user asks again", least=0, most=1)
    mix: dict[str, float] = knob(DEFAULT_MIX, "weights of the kinds of message, as kind=weight")
    seed: int = knob(0, "")  # TrainSettings has the text


SettingsT = TypeVar("SettingsT", bound=GenerateSettings)


def for_writer(settings: SettingsT, writer: str) -> SettingsT:
    """Return the settings with ``writer`` and its defaults for settings that are None."""
    left = {key: value for key, value in WRITERS[writer].items() if getattr(settings, key) is None}
    return replace(settings, writer=writer, **left)


@dataclass(frozen=True)
class RunSettings(TrainSettings, GenerateSettings):
    """Settings of a run from the first prompt to the last step.

    Without ``data`` the target first writes ``conversations``. ``init`` is a checkpoint to continue from; it keeps its
    architecture, its draft vocabulary and the target layers that it sees.
    """

    model: str | None = knob(None, "target: the built-in default, a folder, a .gguf file, or a Hub id")
    arch: str = knob("moa", "architecture: moa, eagle3, early-exit, independent")
    data: tuple[Path, ...] = knob((), "token stores (JSON lines of {p, r} token ids, .gz too)")
    prompts: Path | None = knob(None, "JSON lines of prompts for the target to answer, .gz too")
    init: Path | None = knob(None, "a checkpoint to train on, with longer futures: a folder, or a shipped one's name")
    minutes: float | None = knob(
        None, "time to train instead of steps; half of it to write without data", above=0, most=1_000_000
    )
    draft_vocab: int | None = knob(
        None, f"tokens that can be drafted (default {DEFAULT_DRAFT_VOCAB}; with init, that checkpoint's)", above=0
    )
    lsa_layers: int | None = knob(
        None, f"target layers that moa sees (default {DEFAULT_LSA_LAYERS}; with init, that checkpoint's)", above=0
    )
    target_layers: int = knob(0, "the target's last layers inside the drafter (TLI); with init 0: as it has", least=0)
    train_target_layers: bool = knob(False, "train these layers too, as copies in the checkpoint")
    held_out: int | None = knob(None, "conversations for evaluation only (default 48, at most a fifth)", above=0)
    longest: int = knob(448, "longer conversations are left out, in tokens", above=1)
    features: str = knob(
        "auto", "target's states: on disk, or computed each time; auto: live on cuda", choices=("auto", "disk", "live")
    )


RECORD_FILE = "training.yaml"
_EXAMPLE = "steps: 3000"
_LARGEST_FILE = 1 << 20
#: Most lists and mappings inside of each other in a YAML file; settings have one.
_DEEPEST = 50
#: Settings whose ``auto`` a run replaces.
_RESOLVED = ("dtype", "curriculum", "features", "writer")
FIELDS = {field.name: field for field in dataclasses.fields(RunSettings)}
TYPES: dict[str, Any] = typing.get_type_hints(RunSettings)


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a YAML file or the record of a run. Raises MoaError if the file, a key or a value is wrong."""
    raw = read_mapping(path, str(path), example=_EXAMPLE)
    raw = raw.get("settings", raw)
    if not isinstance(raw, dict):
        raise MoaError(f"{path} must hold keys and values, such as `{_EXAMPLE}`", code="wrong_type")
    raw = dict(raw)
    if raw.pop("first_layers", 0) != 0:  # in the record of each run of version 0.1.0
        raise MoaError(f"{path}: {FIRST_LAYERS}", code="unsupported")
    for key in raw.keys() - FIELDS.keys():
        raise MoaError(f"{path} has an unknown key {key!r}: known are {', '.join(FIELDS)}", code="unknown_key")
    return checked({key: value for key, value in raw.items() if value is not None}, str(path))


def checked(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Convert values to the types of their settings. Raises MoaError for a wrong type or a value out of range."""
    where = f"{source}: " if source else ""
    return {key: _in_range(key, _typed(key, value, where), where) for key, value in values.items()}


def resolve(*layers: Mapping[str, Any]) -> RunSettings:
    """Merge layers of settings, later ones over earlier ones. Raises MoaError if settings contradict each other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        if "steps" in layer and "minutes" in layer:
            raise MoaError("steps and minutes exclude each other: give one of them", code="options_conflict")
        for one, other in (("steps", "minutes"), ("minutes", "steps")):
            if one in layer:
                merged.pop(other, None)
        merged.update(layer)
    settings = RunSettings(**merged)
    if settings.step_tokens % settings.accumulate:
        raise MoaError(f"accumulate must divide step_tokens ({settings.step_tokens})", code="not_divisible")
    if settings.data and settings.prompts:
        raise MoaError("prompts and data exclude each other: data already holds answers", code="options_conflict")
    if settings.minutes is None and not settings.steps:
        settings = replace(settings, steps=DEFAULT_STEPS)
    if settings.curriculum == "auto":
        settings = replace(settings, curriculum="none" if settings.init else "full")
    return settings


def contradiction(stored: RunSettings, given: Mapping[str, Any]) -> str | None:
    """Describe the first given setting that differs from those of a run, with both values; None if there is none."""
    for key, value in given.items():
        if getattr(stored, key) != value and not (value == "auto" and key in _RESOLVED):
            return f"{key} ({value}; the run has {getattr(stored, key)})"
    return None


def plain(settings: RunSettings, *, names_only: bool = False) -> dict[str, Any]:
    """Return the settings that are set as types of YAML and JSON.

    Args:
        names_only: paths without their folders, for files that go to other machines.
    """

    def text(path: Path) -> str:
        return path.name if names_only else str(path.absolute())

    found: dict[str, Any] = {}
    for key in FIELDS:
        value = getattr(settings, key)
        if key == "model" and value and names_only:
            value = Path(value).name if Path(value).is_dir() else value
        elif isinstance(value, tuple):
            value = [text(item) for item in value]
        elif isinstance(value, Path):
            value = text(value)
        if value is not None and value != [] and (key, value) != ("steps", 0):
            found[key] = value
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a YAML file in one rename."""
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(yaml.safe_dump(dict(record), sort_keys=False, allow_unicode=True), encoding="utf-8")
    scratch.replace(path)


def read_mapping(path: Path, name: str, *, example: str, error: type[MoaError] = MoaError) -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Args:
        name: the file's name in messages.
        example: a possible line of the file, for messages.
        error: class of the error for no such file, no YAML, or no mapping.
    """
    import yaml

    try:
        text = read_checked_text(path, _LARGEST_FILE)
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                text = f"{name} has aliases (*name), which can stand for any size: write them out"
                raise error(text, code="not_yaml")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # the parser takes the square of it
                raise error(f"{name} is nested too deeply", code="not_yaml")
        raw = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"cannot read {name}: {reason}", code="unreadable") from problem
    except RecursionError as problem:
        raise error(f"{name} is nested too deeply", code="not_yaml") from problem
    except yaml.YAMLError as problem:
        raise error(f"{name} is no YAML: {' '.join(str(problem).split())}", code="not_yaml") from problem
    if not isinstance(raw, dict):
        raise error(f"{name} must hold keys and values, such as `{example}`", code="wrong_type")
    return raw


#: Names of the types of settings, for messages.
_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a file",
    tuple[Path, ...]: "a list of files",
    dict[str, float]: "kinds with weights",
}


def _typed(key: str, value: Any, where: str) -> Any:
    """Convert ``value`` to the type of the setting ``key``."""
    kind = next(kind for kind in (TYPES[key], *typing.get_args(TYPES[key])) if kind in _TYPE_NAMES)
    is_path = isinstance(value, str | Path)
    try:
        if kind == tuple[Path, ...] and value:
            return (Path(value),) if is_path else tuple(Path(item) for item in value)
        if kind == dict[str, float]:
            return {str(name): float(weight) for name, weight in dict(value).items()}
        if kind is Path and is_path:
            return checkpoint_of(value) if key == "init" else Path(value)
        if kind is float and not isinstance(value, bool):
            return float(value)  # also of text: YAML reads 5e-4 as text, because its numbers need a point
        if type(value) is kind:
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise MoaError(f"{where}{key} must be {_TYPE_NAMES[kind]}, not {value!r}", code="wrong_type")


def _in_range(key: str, value: Any, where: str) -> Any:
    limits = FIELDS[key].metadata
    above, least, most = limits["above"], limits["least"], limits["most"]
    wrong = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if above is not None and not value > above:
            wrong = "positive" if above == 0 else f"above {above}"
        elif least is not None and not value >= least:
            wrong = f"at least {least}"
        elif most is not None and not value <= most:
            wrong = f"at most {most}"
        elif math.isinf(value):
            wrong = "finite"
    elif limits["choices"] and value not in limits["choices"]:
        wrong = f"one of {', '.join(limits['choices'])}"
    if wrong:
        raise MoaError(f"{where}{key} must be {wrong}, not {value}", code="out_of_range")
    return value
