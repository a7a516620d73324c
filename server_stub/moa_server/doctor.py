"""``moa-serve --doctor``: what this machine can serve, measured through the engine's contract."""

from __future__ import annotations

import itertools
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moa_runtime.options import available_cpus
from moa_server.edge.server import ceiling, raise_descriptor_limit
from moa_server.engine.base import Engine, EngineFacts
from moa_server.engine.dtypes import has_bfloat16
from moa_server.engine.load import TimedSteps, warm_up
from moa_server.scheduling.scheduler import MOST_SEQUENCES
from moa_server.scheduling.step_cost import StepCost

#: Tokens a second for every session.
LEAST_RATE = 10.0
#: For sessions that draft: tokens of a draft, and tokens that its round commits (README: chains, with copying).
DRAFTED, COMMITTED = 8, 3

_CONTEXT, _SHORT_CONTEXT, _PREFILL, _SEQUENCES, _REPEATS = 512, 64, 256, 8, 5
_TOKENS = (1, 4, 8, 16)
#: Sessions and lengths of drafts whose steps show what drafting is worth, and the probability that a drafted token is
#: right if those before it are.
_CROWDS, _DRAFTS, LIKELY = (1, 2, 4, 8, 16, 32), (0, 1, 2, 4), 0.6
_CROWD_REPEATS = 3
#: If the slowest of equal steps takes this many times the median, other programs use the processor.
_DISTURBED = 2.0
#: Seconds that the driver may take to name the GPU.
_GPU_SECONDS = 10
#: Tokens that a sequence may take beside its context: blocks are reserved whole, and for what follows.
_RESERVED = 256


@dataclass(frozen=True)
class StepTiming:
    """A measured step: ``tokens`` of each of ``sequences``, after ``context`` tokens.

    Attributes:
        seconds: the median of equal steps.
        slowest_seconds: of the slowest of these.
    """

    what: str
    sequences: int
    tokens: int
    context: int
    seconds: float
    slowest_seconds: float

    @classmethod
    def of(cls, what: str, sequences: int, tokens: int, context: int, seconds: Sequence[float]) -> StepTiming:
        """Sum up equal steps, which took ``seconds``."""
        return cls(what, sequences, tokens, context, statistics.median(seconds), max(seconds))


@dataclass(frozen=True)
class DraftingWorth:
    """What drafting is worth to ``sessions`` sessions in one step.

    Attributes:
        seconds: of a step with one token for each.
        drafted_seconds: that each drafted token adds, if each session has one.
        pays_from: probability from which that token brings more than the same time without drafts.
        length: of the drafts that bring the most tokens a second, of those measured, if each token is right with
            :data:`LIKELY`.
        gain: tokens a second with these, as a multiple of those without drafts.
    """

    sessions: int
    seconds: float
    drafted_seconds: float
    pays_from: float
    length: int
    gain: float

    @classmethod
    def of(cls, sessions: int, seconds: Mapping[int, float]) -> DraftingWorth:
        """Find the draft with the most tokens a second, from measured ``seconds`` of a step by the length of drafts, 0
        and 1 among them. A longer draft that took less time shows that the shorter one was disturbed."""
        seconds = {length: min(took for longer, took in seconds.items() if longer >= length) for length in seconds}
        more = seconds[1] - seconds[0]
        rates = {length: sum(LIKELY**level for level in range(length + 1)) / took for length, took in seconds.items()}
        best = max(rates, key=rates.__getitem__)
        return cls(sessions, seconds[0], more / sessions, more / seconds[0], best, rates[best] / rates[0])


@dataclass(frozen=True)
class SessionCapacity:
    """Number of concurrent sessions with :data:`LEAST_RATE` tokens a second each, counting the verifier's time alone:
    streaming token by token, and with rounds of :data:`DRAFTED` drafted tokens that commit :data:`COMMITTED`."""

    streaming: int
    drafting: int


@dataclass(frozen=True)
class Machine:
    """Facts about the machine and this process."""

    cores: int  # number that this process may use
    threads: int  # number that the target uses
    gpu: str  # its name; empty without one
    bfloat16: bool | None  # whether the processor has bfloat16 instructions; None if unknown
    resident_bytes: int | None  # memory of this process; None if unknown


@dataclass(frozen=True, kw_only=True)
class Facts(EngineFacts):
    """Facts about the engine and the options, for the report."""

    descriptors: int | None  # open files and connections that the system allows; None for any number
    connections: int  # held at once
    max_sessions: int  # see :class:`moa_server.settings.Settings`


async def measure(engine: Engine) -> list[StepTiming]:
    """Time the steps that everything else follows from; the engine is warm and empty-handed afterwards."""
    await warm_up(engine, StepCost())
    tokens = [count for count in _TOKENS if count - 1 <= engine.capabilities.max_draft_tokens]
    context = max(1, min(_CONTEXT, engine.max_context - max(tokens)))
    short = min(_SHORT_CONTEXT, context)
    prefill = min(_PREFILL, engine.max_context)
    timed = []
    with TimedSteps(engine, StepCost()) as trial:
        sequence = trial.open()
        await trial.prefill(sequence, context)
        for count in tokens:
            seconds = [await trial.verify([sequence], count - 1) for _ in range(_REPEATS)]
            timed.append(StepTiming.of(f"{count} token{'s' * (count > 1)}", 1, count, context, seconds))
    with TimedSteps(engine, StepCost()) as trial:
        several = [trial.open() for _ in range(_SEQUENCES)]
        for sequence in several:
            await trial.prefill(sequence, short)
        for count, what in ((1, "1 token, short context"), (_SEQUENCES, f"{_SEQUENCES} sequences, 1 token each")):
            seconds = [await trial.verify(several[:count]) for _ in range(_REPEATS)]
            timed.append(StepTiming.of(what, count, 1, short, seconds))
    with TimedSteps(engine, StepCost()) as trial:
        seconds = [await trial.prefill(trial.open(), prefill)]
        timed.append(StepTiming.of(f"prefill of {prefill} tokens", 1, prefill, 0, seconds))
    return timed


async def measure_drafting(engine: Engine) -> list[DraftingWorth]:
    """Measure what drafting is worth by the number of sessions, as many as the caches and one step hold; the engine is
    warm. Empty if it verifies no drafts."""
    lengths = [length for length in _DRAFTS if length <= engine.capabilities.max_draft_tokens]
    context = min(_SHORT_CONTEXT, engine.max_context - max(lengths))
    if 1 not in lengths or context < 1:
        return []
    most = min(MOST_SEQUENCES, engine.cache_use[1] // (context + _RESERVED))
    found = []
    with TimedSteps(engine, StepCost()) as trial:
        opened: list[int] = []
        for count in (count for count in _CROWDS if count <= most):
            while len(opened) < count:
                opened.append(trial.open())
                await trial.prefill(opened[-1], context)
            best = dict.fromkeys(lengths, math.inf)
            for _ in range(_CROWD_REPEATS):
                for length in lengths:
                    best[length] = min(best[length], await trial.verify(opened, length))
            found.append(DraftingWorth.of(count, best))
    return found


def sessions(timed: Sequence[StepTiming], most: int) -> SessionCapacity:
    """Estimate from the measured steps how many sessions can run at once, at most ``most``.

    A step of several sessions is taken to cost one token's time, and for each further sequence and each drafted token
    what they cost in the steps that were measured.
    """
    drafts = [step for step in timed if step.sequences == 1 and step.context == timed[0].context]
    one, longest = drafts[0], drafts[-1]
    lone, several = next((a, b) for a, b in itertools.pairwise(timed) if b.sequences > 1)
    per_sequence = max(0.0, several.seconds - lone.seconds) / (several.sequences - 1)
    per_token = max(0.0, longest.seconds - one.seconds) / max(1, longest.tokens - 1)

    def seconds(count: int, drafted: int) -> float:
        steps = -(-count // MOST_SEQUENCES)
        return steps * one.seconds + (count - steps) * per_sequence + count * drafted * per_token

    def served(drafted: int, committed: int) -> int:
        fitting = (count for count in range(most, 0, -1) if seconds(count, drafted) <= committed / LEAST_RATE)
        return next(fitting, 0)

    return SessionCapacity(served(0, 1), served(DRAFTED, COMMITTED))


def advice(facts: Facts, machine: Machine, timed: Sequence[StepTiming], able: SessionCapacity) -> list[str]:
    """Return sentences that an operator can act on."""
    said = []
    disturbed = [step for step in timed if step.slowest_seconds > _DISTURBED * step.seconds]
    if disturbed:
        text = f"{len(disturbed)} of {len(timed)} kinds of steps once took over {_DISTURBED:g} times their median"
        said.append(f"{text}: stop other programs, and run --doctor again")
    if machine.gpu and facts.device == "cpu":
        said.append(f"there is a GPU, {machine.gpu}, and the target runs on the CPU: see --device")
    if facts.device == "cpu" and machine.threads > machine.cores:
        text = f"{machine.threads} threads share {machine.cores} cores, and wait for each other"
        said.append(f"{text}: --threads {machine.cores}")
    if able.streaming == able.drafting == 0:
        said.append(f"not even one session gets {LEAST_RATE:g} tokens a second: a smaller target or a GPU would help")
    return said


def report(
    facts: Facts, machine: Machine, engine: Engine, timed: Sequence[StepTiming], worth: Sequence[DraftingWorth]
) -> dict[str, Any]:
    """Return the report as a dictionary, for JSON."""
    able = sessions(timed, facts.max_sessions)
    assumed = {"least_tokens_per_second": LEAST_RATE, "drafted_tokens": DRAFTED, "committed_tokens": COMMITTED}
    return {
        "target": engine.fingerprints.target,
        "drafter": engine.fingerprints.drafter,
        "max_context": engine.max_context,
        "cache_tokens": engine.cache_use[1],
        "machine": asdict(machine),
        **asdict(facts),
        "steps": [asdict(step) for step in timed],
        "sessions": {**asdict(able), **assumed},
        "drafting": [asdict(each) for each in worth],
        "advice": advice(facts, machine, timed, able),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the report for people."""
    machine, able = found["machine"], found["sessions"]
    descriptors = found["descriptors"] or "any number of"
    native = {True: "yes", False: "no", None: "not known"}[machine["bfloat16"]]
    lost = found["perplexity_ratio"]
    rounding = [] if lost is None else [f"rounding        perplexity {lost:.3f} times that of the unrounded target"]
    lines = [
        f"target          {found['target']}, {found['dtype']} on {found['device']} by the pass {found['target_pass']}, "
        f"context {found['max_context']}",
        f"drafter         {found['drafter'] or 'none'}",
        f"CPU             {machine['threads']} threads on {machine['cores']} cores, bfloat16 instructions: {native}",
        f"GPU             {machine['gpu'] or 'none'}",
        f"memory          {_mebibytes(machine['resident_bytes'])} with the target loaded; caches take at most "
        f"{_mebibytes(found['cache_bytes'])} more ({found['cache_tokens']} tokens)",
        f"connections     {found['connections']} (the system allows {descriptors} open files)",
        f"batch-invariant {'yes' if found['batch_invariant'] else 'no: sequences in one step may round differently'}",
        *rounding,
        "",
        f"{'step':<26}{'context':>8}{'ms':>10}",
    ]
    lines += [f"{step['what']:<26}{step['context']:>8}{step['seconds'] * 1e3:>10.1f}" for step in found["steps"]]
    rate = f"{able['least_tokens_per_second']:g} tokens a second each, the verifier's time alone counted"
    drafts = f"drafts of {able['drafted_tokens']} tokens that commit {able['committed_tokens']} a round"
    lines += [
        "",
        f"sessions        {able['streaming']} streaming, {able['drafting']} drafting",
        f"                with at least {rate};",
        f"                drafting: {drafts}; at most --max-sessions {found['max_sessions']}",
    ]
    if found["drafting"]:
        last = f"{f'draft at {LIKELY}':>14}{'gain':>7}"
        lines += ["", f"{'sessions in a step':<20}{'ms':>8}{'ms a drafted token':>20}{'pays from':>11}{last}"]
    for one in found["drafting"]:
        drafted_ms = 1e3 * one["drafted_seconds"]
        pays_from = f"{one['pays_from']:.2f}" if one["pays_from"] < 1 else "never"  # it is a probability
        lines.append(
            f"{one['sessions']:<20}{1e3 * one['seconds']:>8.1f}{drafted_ms:>20.2f}{pays_from:>11}"
            f"{one['length']:>14}{one['gain']:>7.2f}"
        )
    return "\n".join([*lines, *(f"advice          {text}" for text in found["advice"])])


def _mebibytes(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / (1 << 20):,.0f} MiB"


def this_machine(threads: int | None) -> Machine:
    """Gather the facts about this machine and process.

    Args:
        threads: that the target was given; None for its library's choice.
    """
    torch = sys.modules.get("torch")  # loaded if the target runs in it
    used = torch.get_num_threads() if torch else threads or available_cpus()
    return Machine(available_cpus(), used, _gpu(), has_bfloat16(), _resident_bytes())


def _gpu() -> str:
    """Return the name of the first GPU; empty if none is known."""
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return "Apple (mps)"
    if not (command := shutil.which("nvidia-smi")):
        return ""
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.partition("\n")[0].strip() if found.returncode == 0 else ""


def facts(engine: EngineFacts, connections: int, max_sessions: int) -> Facts:
    """Return the facts about a loaded engine; ``connections`` is the wanted limit."""
    descriptors = raise_descriptor_limit()
    return Facts(
        **asdict(engine),
        descriptors=descriptors,
        connections=ceiling(connections, descriptors),
        max_sessions=max_sessions,
    )


def _resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
