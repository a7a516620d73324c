"""The tasks of ``moa-train``: from settings in a file, in flags or of an earlier start to a finished drafter."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moa_drafter.config import CHECKPOINT_FOLDER
from moa_drafter.devices import check_device, fastest_dtype
from moa_drafter.progress import Progress
from moa_drafter.target import DEFAULT_TARGET, Target, load_target
from moa_drafter.training import distributed as processes
from moa_drafter.training.data import check_token_file, keep
from moa_drafter.training.generation import (
    check_installed,
    generate_conversations,
    lines_held,
    open_decoder,
    resolve_writer,
)
from moa_drafter.training.settings import (
    DEFAULT_CONVERSATIONS,
    RECORD_FILE,
    GenerateSettings,
    RunSettings,
    contradiction,
    for_writer,
    plain,
    read_settings,
    resolve,
    write_record,
)
from moa_drafter.training.train import (
    CHECK_STEPS,
    check_names,
    parameters_of,
    profile_run,
    read_material,
    start_drafter,
    train_run,
)
from moa_drafter.training.trainer import STATE_FILE
from moa_runtime.errors import MoaError

WRITTEN_FILE = "conversations.jsonl"
_PROFILE_STEPS = 50
_LONGER = 60  # further seconds of writing if too little was written in its time
#: Conversations of a batch in a run of few minutes: the clock is read after each batch, and larger ones take minutes.
_BRIEF_MINUTES, _BRIEF_BATCH = 10, 8


@dataclass
class Command:
    """One call of ``moa-train``. Every task returns the result to print, or None if another process prints it.

    Args:
        out: folder of the run.
        config: a YAML file of settings.
        flags: checked settings that override the file's.
        pause_after: minutes from now.
    """

    out: Path
    config: Path | None
    flags: Mapping[str, Any]
    resume: bool
    pause_after: float | None
    device: str | None
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise MoaError(f"--out {self.out} is a file, and a run needs a folder: name another", code="not_a_folder")
        self._until = math.inf if self.pause_after is None else time.monotonic() + 60 * self.pause_after
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(self.device)
        if self.device.startswith("cuda"):
            torch.set_float32_matmul_precision("high")

    def train(self) -> dict[str, Any] | None:
        """Write conversations if needed, then train."""
        with processes.joined(self.device) as device:
            settings = self._settings(device)
            target = _load(settings, device)
            if not settings.data:
                start_drafter(target, [], settings)  # refuses impossible settings before hours of writing
                settings = self._write_in_time(target, settings)
                held = lines_held(self.out / WRITTEN_FILE)
                if held < (settings.conversations or DEFAULT_CONVERSATIONS):
                    return {"finished": False, "conversations": held, "out": str(self.out)}
            with Progress(desc="training", unit="step", disable=bool(processes.rank())) as bar:

                def report(figures: dict[str, float], steps: int) -> None:
                    bar.total = steps
                    speed = f"{figures['tokens_per_second']:.0f}"
                    bar.set_postfix(loss=f"{figures['loss']:.3f}", tokens_s=speed, refresh=False)
                    bar.update(int(figures["step"]) - bar.n)

                # A run that was interrupted before its first checkpoint begins again.
                resume = self.resume and (self.out / STATE_FILE).is_file()
                result = train_run(
                    target, self._files(settings), self.out, settings, resume=resume, report=report, until=self._until
                )
            if processes.rank():
                return None
            checkpoint = self.out / CHECKPOINT_FOLDER
            further = {"next": next_commands(checkpoint, settings)} if result["finished"] else {}
            return {"checkpoint": str(checkpoint), **result, **further}

    def write_only(self) -> dict[str, Any]:
        """Write the conversations, and after the last one a compressed file with a card."""
        settings = self._settings(str(self.device))
        if settings.data:
            raise MoaError("--write-only and data exclude each other: leave one out", code="options_conflict")
        target, file = _load(settings, str(self.device)), self.out / WRITTEN_FILE
        finished = self._write(target, settings, self._until)
        result = {"conversations": lines_held(file), "writer": settings.writer, "file": str(file)}
        kept = {"kept": str(keep(file, target, settings))} if finished else {}
        return {"finished": finished, **result, **kept}

    def dry_run(self) -> dict[str, Any]:
        """Return resolved settings, counts and parameters; writes nothing."""
        settings = self._settings(str(self.device))
        written = settings.data or (self.out / WRITTEN_FILE).is_file()
        if not written:
            check_installed(settings)
        target = _load(settings, str(self.device))
        material = read_material(target, self._files(settings), settings) if written else None
        drafter = start_drafter(target, material.conversations if material else [], settings)
        return {
            "settings": plain(settings),
            "data": material.record if material else {"to_write": settings.conversations or DEFAULT_CONVERSATIONS},
            "parameters": parameters_of(drafter),
            "target": {"name": target.folder.name, "fingerprint": target.fingerprint},
            "device": self.device,
        }

    def self_check(self) -> dict[str, Any]:
        """Take ten steps at the run's settings, in which the loss must fall."""
        return self._check(CHECK_STEPS, must_fall=True)

    def profile(self) -> dict[str, Any]:
        """Measure the parts of a step."""
        return self._check(_PROFILE_STEPS, must_fall=False)

    def _check(self, steps: int, *, must_fall: bool) -> dict[str, Any]:
        settings = self._settings(str(self.device))
        target = _load(settings, str(self.device))
        files = settings.data or tuple(file for file in self._files(settings) if file.is_file())
        return profile_run(target, files, settings, steps, must_fall=must_fall)

    def _files(self, settings: RunSettings) -> tuple[Path, ...]:
        return settings.data or (self.out / WRITTEN_FILE,)

    def _settings(self, device: str) -> RunSettings:
        from_file = read_settings(self.config) if self.config else {}
        record = self.out / RECORD_FILE
        if not self.resume:
            settings = resolve(from_file, self.flags)
            if settings.dtype == "auto":
                dtype = "bfloat16" if fastest_dtype(device) == torch.bfloat16 else "float32"
                settings = replace(settings, dtype=dtype)
            check_names(settings)
            for file in settings.data:
                check_token_file(file)
            if settings.data:
                return settings
            if settings.writer == "auto" and record.is_file() and lines_held(self.out / WRITTEN_FILE):
                settings = replace(settings, writer=_recorded(record).writer)  # what is installed may have changed
            return resolve_writer(settings, device)
        if not record.is_file():
            raise MoaError(f"nothing to resume in {self.out}: it has no {RECORD_FILE}", code="nothing_to_resume")
        stored = _recorded(record)
        given = {key: _absolute(value) for key, value in {**from_file, **self.flags}.items()}
        if problem := contradiction(stored, given):
            raise MoaError(
                f"{self.out} was started with another {problem}: resume without it, or choose another --out",
                code="settings_differ",
            )
        return stored

    def _write_in_time(self, target: Target, settings: RunSettings) -> RunSettings:
        """Write conversations; in a run with minutes and no number of them for half of its time, and a minute more if
        they would be too few to train on. Returns the settings with the written number and the minutes left then."""
        if settings.minutes is None or settings.conversations is not None:
            self._write(target, settings, self._until)
            return settings
        if settings.minutes <= _BRIEF_MINUTES:
            settings = replace(settings, write_batch=min(settings.write_batch or _BRIEF_BATCH, _BRIEF_BATCH))
        half = time.monotonic() + 30 * settings.minutes
        self._write(target, settings, min(self._until, half + _LONGER), few_from=half)
        held = lines_held(self.out / WRITTEN_FILE)
        if time.monotonic() >= self._until or not held:
            return settings
        return replace(settings, conversations=held, minutes=settings.minutes / 2)

    def _write(self, target: Target, settings: RunSettings, until: float, *, few_from: float = math.inf) -> bool:
        """Write conversations as :func:`generate_conversations` does; whether there are enough."""
        wanted = settings.conversations or DEFAULT_CONVERSATIONS
        file = self.out / WRITTEN_FILE
        if processes.count() > 1 and lines_held(file) < wanted:
            raise MoaError("several processes only train: write the conversations first (--write-only)", code="too_few")
        if lines_held(file) < wanted:
            check_installed(settings)
        if not processes.rank():
            self._record_writing(settings)
        if lines_held(file) >= wanted:
            return True
        with (
            closing(open_decoder(target, settings)) as decoder,
            Progress(total=wanted, desc=f"writing with {decoder.name}", unit="conversation") as bar,
        ):
            return generate_conversations(
                decoder,
                file,
                settings,
                prompts=settings.prompts,
                report=lambda held: bar.update(held - bar.n),
                until=until,
                few_from=few_from,
            )

    def _record_writing(self, settings: RunSettings) -> None:
        """Keep the settings for --resume; refuse to mix texts of different settings."""
        record = self.out / RECORD_FILE
        if (self.out / STATE_FILE).is_file():
            return
        if record.is_file() and lines_held(self.out / WRITTEN_FILE):
            stored = _recorded(record)
            keys = [*GenerateSettings.__dataclass_fields__, "prompts", "model"]
            keys.remove("conversations")
            writing = {key: _absolute(getattr(settings, key)) for key in keys}
            if problem := contradiction(stored, writing):
                raise MoaError(
                    f"{self.out / WRITTEN_FILE} was written with another {problem}: choose another --out",
                    code="settings_differ",
                )
        write_record(record, {"settings": plain(settings)})

    @staticmethod
    def describe(result: Mapping[str, Any]) -> str:
        """Format a result for people: a line for each value."""
        lines = _lines({key: value for key, value in result.items() if key not in ("finished", "next")})
        return "\n".join([*lines, *(f"next: {command}" for command in result.get("next", ()))])


def next_commands(checkpoint: Path, settings: RunSettings) -> list[str]:
    """Return the commands that put a trained drafter to use."""
    bundle = checkpoint.with_name("bundle")
    model = [] if settings.model in (None, DEFAULT_TARGET) else ["--model", settings.model]
    commands = (
        ["moa-export", *model, "--drafter", str(checkpoint), "--out", str(bundle)],
        ["moa-serve", *model, "--drafter", str(checkpoint)],
        ["moa-chat", "--bundle", str(bundle)],
    )
    return [shlex.join(words) for words in commands]


def _load(settings: RunSettings, device: str) -> Target:
    return load_target(settings.model or DEFAULT_TARGET, device=device, dtype=getattr(torch, settings.dtype))


def _recorded(record: Path) -> RunSettings:
    """Read the settings of an earlier start."""
    stored = resolve(read_settings(record))
    if stored.data or stored.writer != "auto":
        return stored
    return for_writer(stored, "transformers")  # the only one of earlier versions


def _absolute(value: Any) -> Any:
    """Make paths absolute, as in a record."""
    if isinstance(value, tuple):
        return tuple(_absolute(item) for item in value)
    return value.absolute() if isinstance(value, Path) else value


def _lines(mapping: Mapping[str, Any], indent: str = "") -> list[str]:
    found: list[str] = []
    for key, value in mapping.items():
        if isinstance(value, dict):
            found += [f"{indent}{key}", *_lines(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found += [line for item in value for line in _lines(item, indent)]
        else:
            items = value if isinstance(value, list) else [value]
            shown = (f"{item:.4g}" if isinstance(item, float) else str(item) for item in items)
            found.append(f"{indent}{key:<22}{' '.join(shown)}")
    return found
