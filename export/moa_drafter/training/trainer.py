"""The training loop: packed steps, curriculum, checkpoints, accuracy by depth."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from moa_drafter.checkpoint import save_checkpoint
from moa_drafter.config import CHECKPOINT_FOLDER
from moa_drafter.drafter import Drafter
from moa_drafter.training import distributed as processes
from moa_drafter.training.batch import Batch, make_batch
from moa_drafter.training.data import Conversation, packed_order
from moa_drafter.training.evaluation import evaluate, fitted_sharpness
from moa_drafter.training.features import Features
from moa_drafter.training.losses import LOSSES
from moa_drafter.training.optimizers import OPTIMIZERS, WeightAverage, future_lengths, learning_rate
from moa_drafter.training.settings import TrainSettings
from moa_runtime.errors import MoaError

STATE_FILE = "training.pt"
Report = Callable[[dict[str, float]], None]


class Trainer:
    """Trains a drafter. Every step is a function of settings, data and its number, so a resumed run continues exactly.

    A step consists of ``settings.accumulate`` micro-batches, which processes share out.

    Attributes:
        step, tokens_seen: optimiser steps and learnt tokens so far.
        stopwatch: switched off unless the run is profiled.
    """

    def __init__(
        self,
        drafter: Drafter,
        conversations: Sequence[Conversation],
        features: Features,
        settings: TrainSettings,
        folder: Path,
        validation: Sequence[int],
    ) -> None:
        if settings.accumulate % processes.count():
            raise MoaError(f"accumulate must be a multiple of the {processes.count()} processes", code="not_divisible")
        self.drafter, self.conversations, self.features = drafter, conversations, features
        self.settings, self.folder, self.validation = settings, folder, validation
        self.step = 0
        self.tokens_seen = 0
        self.stopwatch = Stopwatch()
        self._parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizers = OPTIMIZERS[settings.optimizer](drafter, settings)
        self.average = WeightAverage(drafter, settings.ema_decay) if settings.ema_decay else None
        # Lengths differ between batches, and a graph for each would cost more than it saves.
        self._loss_of = torch.compile(self._loss, dynamic=True) if settings.compile else self._loss

    def run(self, report: Report, *, until: float = math.inf) -> bool:
        """Train to ``settings.steps``, evaluating and saving on the way and at the end; whether the end was reached.
        Raises MoaError if the loss or the weights are not finite any more; the last saved state stays.

        Args:
            report: called after every step with ``step``, ``loss`` (nats) and ``tokens_per_second``.
            until: reading of ``time.monotonic`` at which to save and stop.
        """
        settings = self.settings
        while self.step < settings.steps:
            pauses = (settings.save_every, settings.evaluate_every)
            stop = min(settings.steps, *(every * (self.step // every + 1) for every in pauses))
            in_time = self.advance(stop - self.step, report, until=until)
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._log(self.evaluate())
            self.save()
            if not in_time:
                break
        return self.step == settings.steps

    def advance(self, steps: int, report: Report, *, until: float = math.inf) -> bool:
        """Train ``steps`` steps without evaluating or saving; false if the time ran out before."""
        for micro_batches in itertools.islice(self.order(), self.step, self.step + steps):
            began = time.monotonic()
            loss, count, late = self.train_step(micro_batches, late=began >= until)
            report({"step": self.step, "loss": loss, "tokens_per_second": count / (time.monotonic() - began)})
            if late:
                return False
        return True

    def order(self) -> Iterator[list[list[int]]]:
        """Yield the conversations of each micro-batch of each step from step 0."""
        held_out = set(self.validation)
        trained = [i for i in range(len(self.conversations)) if i not in held_out]
        accumulate = self.settings.accumulate
        lengths = [len(self.conversations[i]) for i in trained]
        packs = packed_order(lengths, self.settings.step_tokens // accumulate, self.settings.seed)
        while True:
            yield [[trained[i] for i in pack] for pack in itertools.islice(packs, accumulate)]

    def train_step(self, micro_batches: Sequence[Sequence[int]], *, late: bool = False) -> tuple[float, int, bool]:
        """Take one optimiser step. Raises MoaError if the loss is not finite.

        Returns:
            the mean loss (nats), the number of learnt tokens, and whether any process is ``late``, which is to stop.
        """
        count = sum(self.conversations[i].learnt for indices in micro_batches for i in indices)
        self.drafter.train()
        self.optimizers.zero_grad()
        total = torch.zeros(2, device=self.drafter.head.device)
        total[1] = late
        for number in range(processes.rank(), len(micro_batches), processes.count()):
            with self.stopwatch.part("data"):
                batch = self._batch(micro_batches[number], number)
            with self.stopwatch.part("drafter forward"), self._autocast():
                # Losses are means, so each counts with its share of the tokens.
                loss = self._loss_of(batch, *self._target(batch)) * (len(batch.queries) / count)
            with self.stopwatch.part("backward"):
                loss.backward()
            total[0] += loss.detach()
        with self.stopwatch.part("optimiser"):
            processes.add_up([total, *(p.grad for p in self._parameters if p.grad is not None)])
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self.optimizers.step(learning_rate(self.settings, self.step))
            self.step += 1
            if self.average:
                self.average.update(self.step)
        self.tokens_seen += count
        mean, anyone_late = total.tolist()  # the only wait for the device
        if not math.isfinite(mean):
            raise self._diverged()
        return mean, count, bool(anyone_late)

    def loss(self, micro_batches: Sequence[Sequence[int]]) -> float:
        """Compute the mean loss (nats) at which the next step would begin with these micro-batches."""
        self.drafter.eval()
        with torch.no_grad(), self._autocast():
            parts = [self._batch(indices, number) for number, indices in enumerate(micro_batches)]
            weighted = sum(float(self._loss(batch, *self._target(batch))) * len(batch.queries) for batch in parts)
        return weighted / sum(len(batch.queries) for batch in parts)

    def _batch(self, indices: Sequence[int], number: int) -> Batch:
        rng = random.Random(f"{self.settings.seed}/{self.step}/{number}")
        lengths = future_lengths(self.settings, self.step)
        return make_batch(self.conversations, self.features, indices, lengths, rng, self.drafter.head.device)

    def _autocast(self) -> torch.autocast:
        device = self.drafter.head.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.settings.dtype == "bfloat16")

    def _target(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the target's hidden states and logits at a batch's queries; outside of the compiled part."""
        hidden = batch.states.last[batch.queries]
        return hidden, self.drafter.target_logits(hidden)

    def _loss(self, batch: Batch, target_hidden: Tensor, target_logits: Tensor) -> Tensor:
        hidden = self.drafter.predict(batch)
        return LOSSES[self.settings.loss](hidden, self.drafter.logits(hidden), target_hidden, target_logits)

    def evaluate(self) -> dict[str, object]:
        """See :func:`~moa_drafter.training.evaluation.evaluate`; of the average if there is one."""
        with self.average.applied() if self.average else nullcontext(), self._autocast():
            figures = evaluate(self.drafter, self.conversations, self.features, self.validation)
        return {"step": self.step, "tokens": self.tokens_seen, **figures}

    def calibrate(self) -> float:
        """Fit the drafter's sharpness to the held-out answers and save its checkpoint with it."""
        with self.average.applied() if self.average else nullcontext():
            with self._autocast():
                sharpness = fitted_sharpness(self.drafter, self.conversations, self.features, self.validation)
            self.drafter.config = replace(self.drafter.config, sharpness=sharpness)
            if not processes.rank():
                save_checkpoint(self.drafter, self.folder / CHECKPOINT_FOLDER)
        return sharpness

    def _log(self, entry: dict[str, object]) -> None:
        if not processes.rank():
            with (self.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")

    def save(self) -> None:
        """Write checkpoint and, atomically, the state for :meth:`resume`; all processes call it. Raises MoaError if the
        weights are not finite or cannot be written."""
        if not all(parameter.isfinite().all() for parameter in self._parameters):
            raise self._diverged()
        optimizers = self.optimizers.state_dict()
        if processes.rank():
            return
        state = {
            "settings": _settings(self.settings),
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "drafter": self.drafter.state_dict(),
            "optimizers": optimizers,
            "average": self.average.weights if self.average else None,
        }
        scratch = self.folder / f".{STATE_FILE}.tmp"
        try:
            with self.average.applied() if self.average else nullcontext():
                save_checkpoint(self.drafter, self.folder / CHECKPOINT_FOLDER)
            torch.save(state, scratch)
            scratch.replace(self.folder / STATE_FILE)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
            scratch.unlink(missing_ok=True)
            raise MoaError(
                f"the run cannot be saved in {self.folder} ({str(error).splitlines()[0]}): make room, and continue "
                "with --resume",
                code="not_writable",
            ) from error

    def _diverged(self) -> MoaError:
        kept = "what was saved before stays" if (self.folder / STATE_FILE).is_file() else "nothing was saved"
        return MoaError(
            f"training diverged: at step {self.step} the loss or the weights are not finite any more; {kept}; give a "
            f"lower learning_rate than {self.settings.learning_rate:g}, or another optimizer",
            code="diverged",
        )

    def resume(self) -> None:
        """Continue from :meth:`save`. Raises MoaError if the run has other settings or its file is damaged."""
        path = self.folder / STATE_FILE
        try:
            self._take(torch.load(path, map_location="cpu", weights_only=True))
        except MoaError:
            raise
        except Exception as error:  # torch has many errors for damaged files
            raise MoaError(
                f"{path} is damaged, so this run cannot continue: train its checkpoint on, with --init "
                f"{self.folder / CHECKPOINT_FOLDER} and another --out",
                code="damaged",
            ) from error

    def _take(self, state: dict[str, Any]) -> None:
        """Take over the state that :meth:`save` wrote."""
        wanted = _settings(self.settings)
        if state["settings"] != wanted:
            changed = [k for k, v in wanted.items() if state["settings"].get(k) != v]
            raise MoaError(f"{self.folder} has other settings ({', '.join(changed)})", code="settings_differ")
        self.drafter.load_state_dict(state["drafter"])
        self.optimizers.load_state_dict(state["optimizers"])
        if self.average:
            for ours, saved in zip(self.average.weights, state["average"], strict=True):
                ours.copy_(saved)
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]


def _settings(settings: TrainSettings) -> dict[str, object]:
    """Return the settings that decide every step; a run has more."""
    return {field.name: getattr(settings, field.name) for field in fields(TrainSettings)}


class Stopwatch:
    """Seconds of a training step by part; an inner part does not count for the outer one.

    On a GPU each boundary waits for the device, which slows a step but makes the figures true.
    """

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self.on:
            yield
            return
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that its time counts as ``name``."""

        def watched(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return watched

    def shares(self) -> dict[str, float]:
        """Return each part's share of the time, the largest first."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])}

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
