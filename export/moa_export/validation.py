"""The proof of an export: every graph is read back from disk, run, and compared with PyTorch.

*Parity*: both device halves replay the same rounds of recorded conversations: they catch up with several committed
tokens at once, draft some tokens one by one, and roll back. PyTorch's goes first, and its results are kept: with a
large vocabulary both would not fit in memory.

*Tau*: a greedy chain commits the target's own text, whatever was drafted. So a round on a known text needs no target:
draft, count how many tokens are the text's, continue after the next one. This is exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.drafter import Drafter
from moa_export.graph_files import NOT_RUN
from moa_export.progress import Advance, Progress
from moa_export.recipe import Recipe, Tolerance
from moa_export.recordings import Recording
from moa_export.targets.base import NotRun, StandIn
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import GrowingRows, MoaDrafter
from moa_runtime.manifest import TargetEntry

PASSED, FAILED = "passed", "failed"
PARITY_CONVERSATIONS = 6
_TIMED_STEPS, _TIMED_CONTEXT = 20, 128
ROUND_TOKENS, DRAFT_STEPS = 8, 4
DRAFT_LENGTH = 6
_ONE = Budget.chain(1, nodes=1)
#: ``{"status": ..., "reason": ...}`` and figures; how a check stands in the manifest.
Check = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """Results of the float32 device half in PyTorch.

    Attributes:
        rehearsals: of the conversations on which parity is measured.
        recordings: all conversations, on which tau is measured.
        stop_tokens: ids that end a turn.
        tolerance: how far a graph may be from it.
    """

    rehearsals: Sequence[Rehearsal]
    recordings: Sequence[Recording]
    tau: Tau
    stop_tokens: Sequence[int]
    tolerance: Tolerance


@dataclass(frozen=True)
class Proof:
    """Checks of one graph by name, and the median time of a one-token step (ms; None where it does not run)."""

    checks: Mapping[str, Check]
    step_ms: float | None

    @property
    def failures(self) -> list[str]:
        """Reasons, one phrase each; empty when nothing failed."""
        return [str(check["reason"]) for check in self.checks.values() if check["status"] == FAILED]


@dataclass(frozen=True)
class Made:
    """One graph of an export: its entry in the manifest, its proof, and the seconds that making and proving it took."""

    entry: TargetEntry
    proof: Proof
    seconds: float


def reference_of(
    drafter: Drafter,
    recordings: Sequence[Recording],
    recipe: Recipe,
    stop_tokens: Sequence[int],
    progress: Progress,
) -> Reference:
    """Let PyTorch draft along in recorded conversations."""
    backend = torch_backend_of(drafter, top_k=recipe.top_k)
    with progress.stage("drafting with PyTorch", len(recordings)) as advance:
        tau = replay(backend, recordings, stop_tokens=stop_tokens, on_conversation=advance)
        rehearsals = [rehearse(backend, recording) for recording in recordings[:PARITY_CONVERSATIONS]]
    return Reference(rehearsals, recordings, tau, stop_tokens, recipe.tolerance)


def prove(runner: Backend | NotRun | StandIn, reference: Reference, advance: Advance) -> Proof:
    """Compare an exported graph with the reference.

    Args:
        advance: called once for the parity check and once for each conversation of the tau check.
    """

    def checks_of(backend: Backend) -> dict[str, Check]:
        parity = compare(reference.rehearsals, backend)
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(parity).items()}
        advance()
        tau = replay(backend, reference.recordings, stop_tokens=reference.stop_tokens, on_conversation=advance)
        loss = 1 - tau.value / reference.tau.value
        figures = {
            "before": round(reference.tau.value, 4),
            "after": round(tau.value, 4),
            "loss": round(loss, 4),
            "prompts": len(reference.recordings),
        }
        most = reference.tolerance.tau_loss
        beyond = [] if loss <= most else [f"tau fell by {loss:.1%}, allowed are {most:.0%}"]
        return {"parity": check(parity.failures(reference.tolerance), rounded), "tau": check(beyond, figures)}

    if isinstance(runner, NotRun):
        return unproved(runner.reason, "parity", "tau")
    return proof_of(runner, checks_of)


def proof_of(runner: Backend | StandIn, checks_of: Callable[[Backend], dict[str, Check]]) -> Proof:
    """Check and time a graph; a stand-in for its engine leaves the check ``engine``, which was not run."""
    backend = runner.backend if isinstance(runner, StandIn) else runner
    checks = checks_of(backend)
    if isinstance(runner, StandIn):
        reason = f"{runner.reason}: compared by onnxruntime in Python on the same graph"
        checks["engine"] = {"status": NOT_RUN, "reason": reason}
    return Proof(checks, step_ms(backend))


def unproved(reason: str, *checks: str) -> Proof:
    """Return the proof of a graph none of whose ``checks`` was made."""
    return Proof({name: {"status": NOT_RUN, "reason": reason} for name in checks}, None)


def check(failures: Sequence[str], figures: Mapping[str, Any]) -> Check:
    """Return a check with its figures, passed unless there are failures."""
    if failures:
        return {"status": FAILED, "reason": "; ".join(failures), **figures}
    return {"status": PASSED, **figures}


def step_ms(backend: Backend) -> float:
    """Median time of a one-token step after some cached tokens; `moa-bench device` measures it with care."""
    cache, memory = (np.zeros((_TIMED_CONTEXT, *shape), np.float32) for shape in (backend.kv_shape, backend.row_shape))
    inputs = StepInputs.chain([1], (cache, cache), (memory, memory))
    times = []
    for _ in range(_TIMED_STEPS):
        began = time.perf_counter()
        backend.step(inputs)
        times.append(time.perf_counter() - began)
    return round(1000 * float(np.median(times)), 3)


@dataclass(frozen=True)
class Step:
    """One step of the reference.

    Attributes:
        tokens: appended after ``held`` cached tokens.
        asked: how many of them are queried, the last ones.
        rows: number of memory rows.
    """

    tokens: list[int]
    held: int
    asked: int
    rows: int


#: A recorded conversation, and every step of the reference in it with its result.
Rehearsal = tuple[Recording, list[tuple[Step, StepResult]]]


@dataclass(frozen=True)
class Parity:
    """The comparison over all queries; errors are of the log-probabilities (nats) of the reference's
    top-k tokens, where both sides list them. The relative one is a share of the reference's own."""

    queries: int
    max_logprob_error: float
    mean_logprob_error: float
    mean_relative_error: float
    top1_agreement: float
    top_k_overlap: float

    def failures(self, tolerance: Tolerance) -> list[str]:
        """Figures beyond ``tolerance``, one phrase each; empty if there are none."""
        # Written so that a figure that is not a number fails too.
        found = []
        if not self.mean_logprob_error <= tolerance.mean_logprob_error:
            found.append(f"mean log-prob error {self.mean_logprob_error:.4f} > {tolerance.mean_logprob_error}")
        if not self.top1_agreement >= tolerance.top1_agreement:
            found.append(f"top-1 agreement {self.top1_agreement:.4f} < {tolerance.top1_agreement}")
        if not self.top_k_overlap >= tolerance.top_k_overlap:
            found.append(f"top-k overlap {self.top_k_overlap:.4f} < {tolerance.top_k_overlap}")
        return found


def rehearse(reference: Backend, recording: Recording) -> Rehearsal:
    """Replay rounds of a recording, queried at every new token of the answer; what is drafted is its own best token."""
    run = _runner(reference, recording)
    steps: list[tuple[Step, StepResult]] = []
    done = 0
    for base in range(recording.prompt, len(recording.tokens), ROUND_TOKENS):
        fresh, held = recording.tokens[done:base], done
        asked = min(len(fresh), ROUND_TOKENS)
        for _ in range(1 + DRAFT_STEPS):
            # The last committed token is the target's bonus: it has no memory row yet.
            step = Step(fresh, held, asked, base - 1)
            result = run(step)
            steps.append((step, result))
            held += len(fresh)
            fresh, asked = [int(result.top_tokens[-1, 0])], 1
        done = base
    return recording, steps


def compare(rehearsals: Sequence[Rehearsal], exported: Backend) -> Parity:
    """Take an exported device half through every step of the reference."""
    errors: list[float] = []
    relative: list[float] = []
    overlaps: list[float] = []
    same_best = 0
    for recording, steps in rehearsals:
        run = _runner(exported, recording)
        for step, ours in steps:
            theirs = run(step)
            for row in range(len(ours.top_tokens)):
                expected = dict(zip(ours.top_tokens[row].tolist(), ours.top_logprobs[row].tolist(), strict=True))
                got = dict(zip(theirs.top_tokens[row].tolist(), theirs.top_logprobs[row].tolist(), strict=True))
                shared = expected.keys() & got.keys()
                errors += [abs(expected[token] - got[token]) for token in shared]
                relative += [abs(1 - got[token] / expected[token]) for token in shared if expected[token]]
                overlaps.append(len(shared) / len(expected))
                same_best += bool(ours.top_tokens[row, 0] == theirs.top_tokens[row, 0])
    return Parity(
        queries=len(overlaps),
        # No shared token at all leaves no error to average: worse than any tolerance.
        max_logprob_error=float(np.max(errors)) if errors else float("inf"),
        mean_logprob_error=float(np.mean(errors)) if errors else float("inf"),
        mean_relative_error=float(np.mean(relative)) if relative else float("inf"),
        top1_agreement=same_best / len(overlaps),
        top_k_overlap=float(np.mean(overlaps)),
    )


def _runner(backend: Backend, recording: Recording) -> Callable[[Step], StepResult]:
    """Return what runs steps of one conversation on ``backend``, with a self-attention cache of its own."""
    cache = GrowingRows(backend.kv_shape)

    def run(step: Step) -> StepResult:
        cache.truncate(step.held)
        memory = recording.keys[: step.rows], recording.values[: step.rows]
        result = backend.step(StepInputs.chain(step.tokens, cache.first(step.held), memory, asked=step.asked))
        cache.write(step.held, result.keys, result.values)
        return result

    return run


@dataclass(frozen=True)
class Tau:
    """Rounds of all conversations, and the tokens they committed (the bonus token included)."""

    rounds: int
    tokens: int

    @property
    def value(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def replay(
    backend: Backend,
    recordings: Sequence[Recording],
    *,
    stop_tokens: Sequence[int] = (),
    draft_length: int = DRAFT_LENGTH,
    on_conversation: Callable[[], None] = lambda: None,
) -> Tau:
    """Hold the recorded conversations again with ``backend`` drafting greedy chains.

    Args:
        stop_tokens: as :class:`~moa_runtime.drafters.moa.MoaDrafter` takes them.
        on_conversation: called after each conversation.
    """
    rounds = tokens = 0
    for recording in recordings:
        drafter = MoaDrafter(backend, max_context=len(recording.tokens) + draft_length, stop_tokens=stop_tokens)
        # The verdict on the prompt brings the first token of the answer.
        base = recording.prompt + 1
        while base < len(recording.tokens):
            held = drafter.rows
            drafter.add_rows(held, recording.keys[held : base - 1], recording.values[held : base - 1])
            stop = min(base + draft_length, len(recording.tokens))
            right = base
            # Token by token, because what comes after a wrong one can commit nothing.
            while right < stop and drafter.propose(recording.tokens[:right], _ONE).tokens[0] == recording.tokens[right]:
                right += 1
            end = min(right + 1, len(recording.tokens))
            rounds, tokens, base = rounds + 1, tokens + end - base, end
        on_conversation()
    return Tau(rounds, tokens)
