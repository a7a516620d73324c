"""The training loop: packed steps, curriculum, checkpoints, accuracy by depth."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from moa_drafter.checkpoint import save_checkpoint
from moa_drafter.drafter import Drafter
from moa_drafter.training.batch import Batch, make_batch
from moa_drafter.training.data import Conversation, packed_order
from moa_drafter.training.features import FeatureStore
from moa_drafter.training.losses import LOSSES, forward_kl
from moa_drafter.training.visibility import FutureLengths, future_lengths_at
from moa_runtime.errors import MoaError

STATE_FILE = "training.pt"
Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class TrainSettings:
    """One run. Sizes are in tokens, ``steps`` in optimiser steps; ``continued`` leaves out the curriculum."""

    steps: int
    step_tokens: int = 640
    learning_rate: float = 5e-4
    final_learning_rate: float = 2e-5
    warmup_steps: int = 60
    weight_decay: float = 0.01
    seed: int = 0
    bfloat16: bool = False
    save_every: int = 250
    evaluate_every: int = 500
    continued: bool = False
    loss: str = "kl"


class Trainer:
    """Trains a drafter; every step is a function of (settings, data, step number), so a resumed run
    continues exactly where it stopped."""

    def __init__(
        self,
        drafter: Drafter,
        conversations: Sequence[Conversation],
        features: FeatureStore,
        settings: TrainSettings,
        folder: Path,
        validation: Sequence[int],
    ) -> None:
        self.drafter, self.conversations, self.features = drafter, conversations, features
        self.settings, self.folder, self.validation = settings, folder, validation
        self.step = 0
        self.tokens_seen = 0
        decayed = [p for p in drafter.parameters() if p.ndim > 1]
        plain = [p for p in drafter.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
        )

    def run(self, report: Report) -> None:
        """Train to ``settings.steps``, evaluating and saving on the way and at the end.

        Args:
            report: called after every step with ``step``, ``loss`` (nats) and ``tokens_per_second``.
        """
        settings = self.settings
        while self.step < settings.steps:
            pauses = (settings.save_every, settings.evaluate_every)
            until = min(settings.steps, *(every * (self.step // every + 1) for every in pauses))
            self.advance(until - self.step, report)
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._log(self.evaluate())
            self.save()

    def advance(self, steps: int, report: Report) -> None:
        """Train ``steps`` steps, without evaluating or saving."""
        held_out = set(self.validation)
        trained = [i for i in range(len(self.conversations)) if i not in held_out]
        lengths = [len(self.conversations[i]) for i in trained]
        order = packed_order(lengths, self.settings.step_tokens, self.settings.seed)
        for indices in itertools.islice(order, self.step, self.step + steps):
            began = time.monotonic()
            loss, count = self._train_step([trained[i] for i in indices])
            report({"step": self.step, "loss": loss, "tokens_per_second": count / (time.monotonic() - began)})

    def _train_step(self, indices: list[int]) -> tuple[float, int]:
        settings = self.settings
        rng = random.Random(f"{settings.seed}/step/{self.step}")
        lengths = future_lengths_at(self.step / settings.steps, continued=settings.continued)
        batch = make_batch(self.conversations, self.features, indices, lengths, rng, self.drafter.head.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.drafter.train()
        with torch.autocast(self.drafter.head.device.type, torch.bfloat16, enabled=settings.bfloat16):
            loss = LOSSES[settings.loss](*self._outputs(batch))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.tokens_seen += len(batch.queries)
        return float(loss.detach()), len(batch.queries)

    def _outputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states and logits of the draft, then of the target, at the queries."""
        hidden, target_hidden = self.drafter.predict(batch), batch.states.last[batch.queries]
        return hidden, self.drafter.logits(hidden), target_hidden, self.drafter.logits(target_hidden)

    def _learning_rate(self) -> float:
        settings = self.settings
        if self.step < settings.warmup_steps:
            return settings.learning_rate * (self.step + 1) / settings.warmup_steps
        done = (self.step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        span = settings.learning_rate - settings.final_learning_rate
        return settings.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    @torch.no_grad()
    def evaluate(self, draft_tokens: int = 6) -> dict[str, object]:
        """Held-out loss, accuracy by depth and tau of a greedy chain, on the target's own answers.

        While all drafted tokens so far are right, a chain follows the target's text, so the accepted
        length of a round is the run of right predictions at the start of its segment.
        """
        self.drafter.eval()
        lengths = FutureLengths(draft_tokens, draft_tokens)
        right = torch.zeros(draft_tokens)
        seen = torch.zeros(draft_tokens)
        losses: list[float] = []
        accepted = rounds = 0
        for index in self.validation:
            batch = make_batch(
                self.conversations, self.features, [index], lengths, random.Random(0), self.drafter.head.device
            )
            _, logits, _, target_logits = self._outputs(batch)
            losses.append(float(forward_kl(logits, target_logits)))
            guess = self.drafter.draft_to_target[logits.argmax(-1)]
            hit = (guess == batch.tokens[batch.queries + 1]).cpu()
            depths = batch.depths.cpu()
            right.index_add_(0, depths - 1, hit.float())
            seen.index_add_(0, depths - 1, torch.ones_like(hit, dtype=torch.float32))
            for segment in hit.split(draft_tokens):
                if len(segment) == draft_tokens:
                    accepted += int(segment.long().cumprod(0).sum())
                    rounds += 1
        return {
            "step": self.step,
            "tokens": self.tokens_seen,
            "loss": sum(losses) / len(losses),
            "tau": 1 + accepted / max(1, rounds),
            "accuracy_by_depth": [round(float(r / s), 4) if s else None for r, s in zip(right, seen, strict=True)],
        }

    def _log(self, entry: dict[str, object]) -> None:
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    def save(self) -> None:
        """Write the drafter's checkpoint and, atomically, what :meth:`resume` needs."""
        save_checkpoint(self.drafter, self.folder / "drafter")
        scratch = self.folder / f".{STATE_FILE}.tmp"
        torch.save(
            {
                "settings": asdict(self.settings),
                "step": self.step,
                "tokens_seen": self.tokens_seen,
                "drafter": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            scratch,
        )
        scratch.replace(self.folder / STATE_FILE)

    def resume(self) -> None:
        """Continue from :meth:`save`.

        Raises:
            MoaError: nothing to resume, or the run was started with other settings.
        """
        path = self.folder / STATE_FILE
        if not path.is_file():
            raise MoaError(f"nothing to resume in {self.folder}: it has no {STATE_FILE}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["settings"] != asdict(self.settings):
            changed = [k for k, v in asdict(self.settings).items() if state["settings"].get(k) != v]
            raise MoaError(
                f"{self.folder} was trained with other settings ({', '.join(changed)}): resume with the same"
            )
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
