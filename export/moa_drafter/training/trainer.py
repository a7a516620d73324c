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
from moa_drafter.model import MoADrafter
from moa_drafter.training.data import Conversation, packed_order
from moa_drafter.training.features import FeatureStore
from moa_drafter.training.visibility import FutureLengths, future_lengths_at, packed_masks, row_limits
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


@dataclass(frozen=True)
class Batch:
    """One packed step; ``queries`` are the positions whose next token is learnt."""

    tokens: Tensor
    positions: Tensor
    target_kv: Tensor
    target_hidden: Tensor
    self_mask: Tensor
    memory_mask: Tensor
    queries: Tensor
    depths: Tensor


def make_batch(
    conversations: Sequence[Conversation],
    features: FeatureStore,
    indices: Sequence[int],
    lengths: FutureLengths,
    rng: random.Random,
    device: torch.device,
) -> Batch:
    """Pack conversations end to end and draw what each position may see."""
    chosen = [conversations[i] for i in indices]
    limits: list[int] = []
    queries: list[int] = []
    for conversation in chosen:
        start = len(limits)
        limits += row_limits(len(conversation.prompt), len(conversation), lengths, rng)
        # The server itself gives the first answer token; the last token has no successor.
        queries += range(start + len(conversation.prompt), start + len(conversation) - 1)
    positions, self_mask, memory_mask = packed_masks([len(c) for c in chosen], limits)
    rows = [features[i] for i in indices]
    where = torch.tensor(queries)
    depths = positions[where] - torch.tensor(limits)[where]
    tensors = (
        torch.tensor([t for c in chosen for t in c.tokens]),
        positions,
        torch.cat([kv for kv, _ in rows]),
        torch.cat([hidden for _, hidden in rows]),
        self_mask,
        memory_mask,
        where,
        depths,
    )
    return Batch(*(tensor.to(device) for tensor in tensors))


def distillation_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Forward KL divergence from target to draft over the draft vocabulary, mean over positions (nats)."""
    return nn.functional.kl_div(
        draft_logits.float().log_softmax(-1),
        target_logits.float().log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )


class Trainer:
    """Trains a drafter; every step is a function of (settings, data, step number), so a resumed run
    continues exactly where it stopped."""

    def __init__(
        self,
        drafter: MoADrafter,
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
        device = self.drafter.Ekv2E.weight.device
        batch = make_batch(self.conversations, self.features, indices, lengths, rng, device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.drafter.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits, target_logits = self._logits(batch)
        loss = distillation_loss(logits, target_logits)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.tokens_seen += len(batch.queries)
        return float(loss.detach()), len(batch.queries)

    def _logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.drafter(
            batch.tokens, batch.positions, batch.target_kv, batch.self_mask, batch.memory_mask, batch.queries
        )
        return self.drafter.logits(hidden), self.drafter.logits(batch.target_hidden[batch.queries])

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
                self.conversations, self.features, [index], lengths, random.Random(0), self.drafter.Ekv2E.weight.device
            )
            logits, target_logits = self._logits(batch)
            losses.append(float(distillation_loss(logits, target_logits)))
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
