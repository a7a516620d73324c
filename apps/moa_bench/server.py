"""``moa-bench server``: many sessions at once on one verifier, for each way in which they are served."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import secrets
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, format_cell, sampling_note, skipped_notes
from moa_bench.draft_bound import draft_bound
from moa_bench.questions import prompts_of
from moa_bench.result import Burst, latency_ms, mean_ms, percentile_ms, ratio, rounded, token_latencies
from moa_bench.server_clients import ClientRecord, Fleet, Window, open_fleet
from moa_bench.serving import AnswerSettings
from moa_bench.verifier import Verifier, VerifierGoneError, open_verifiers
from moa_runtime.errors import MoaError
from moa_runtime.options import available_cpus
from moa_runtime.session.handshake import Limits
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.auth import digest
from moa_server.settings import ENGINES, Settings

if TYPE_CHECKING:
    import psutil
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = ("auto", "device", "server", "stream")
#: Of a bearer for which the verifier shall not draft: its first draft uses up the budget of hours.
_NO_DRAFTS = {"drafted_tokens_per_second": 1e-6}
_MOST_SESSIONS = Settings().max_sessions
_WARM_UP_S = 2.0
_GONE = "the verifier ended in the middle of the measurement"
_SAMPLE_EVERY_S = 0.05
_LONGEST_FORGETTING_S = 30.0
_HEADER = ("sessions", "mode", "tokens/s", "by window", "tokens/CPU s", "ms/token", "p50", "p95")
_HEADER += ("first token ms", "p95", "passes/token", "sessions/pass", "tokens/round", "peak MB", "client CPU")
_LAST_FIGURES = ("passes_per_token", "sessions_per_pass", "tokens_per_round", "peak_memory_mb", "client_cpu_share")
#: Figures that are compared with streaming's, with their names in the table.
_COMPARED = {"tokens_per_s": "tokens/s", "tokens_per_cpu_s": "tokens/CPU s", "ms_per_token": "ms/token"}


class Server(Benchmark):
    """Throughput and latency of many sessions at once."""

    name = "server"
    purpose = "The cost of many sessions at once for the verifier."
    summary = "many sessions at once: drafting against streaming"
    description = """\
Measure the service of N sessions at once by one verifier, for each way in which they are served: chats that draft on
the device, on the server, or wherever it is faster (auto, the default of every program), and chats without any drafts
(stream).

Each session is a client in a process of its own. All clients begin together and ask one question after the other,
each in a new conversation. The window begins when each has the first token of an answer, so that these prompts do
not count; at its end unfinished answers are given up. Only committed tokens that arrived within the window count.
Prompts of later answers within it do count, and windows differ by their number: with short answers or few seconds
that is noise. In all modes a client asks the same questions in the same order. Verifier and clients have processors
of their own if the machine has two or more. Each window has a bearer token of its own, so that prompts are shared
within a window alone. A verifier of yours (--server) knows one token: there later windows find the prompts of
earlier ones, and stream has the drafts of that verifier unless it runs with --no-drafts.

tokens_per_s      of all sessions together
tokens_per_cpu_s  by processor seconds of the verifier's process, all of its threads; null with --server
ms_per_token      as one session sees it: k tokens that arrive t ms after those before them took t / k ms each;
                  the first token of an answer is left out
ttft_ms           from sending a question to its first token, also of questions sent before the window
sessions_per_pass verdicts by forward passes of the target, prompts included
passes_per_token  forward passes of the target, prompts included, by tokens; passes whose tokens arrive just
                  outside the window blur it
tokens_per_round  committed by one verdict; null when streaming
peak_memory_mb    the verifier's largest resident set, in 10^6 bytes; null with --server
client_cpu_share  processor time of all clients by that of the processors they share; near 1 the clients, not the
                  verifier, limit the figures: real devices would not share processors
by_stream         medians over windows of the figures divided by streaming's in the window of the same turn
bound             the largest (n + sum of q) / T(n + |S|) over sets S of drafted nodes, divided by n / T(n): T are the
                  step costs, q the probabilities of nodes, both as the verifier measured them in these windows
of_bound          tokens_per_cpu_s by streaming's, divided by the bound (tokens_per_s with --server); the noise of
                  windows may bring it above 1
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        add(
            "--sessions N,N,...",
            f"numbers of sessions at once, each from 1 to {_MOST_SESSIONS} (default %(default)s)",
            default="1,4,8",
        )
        add("--modes MODE,MODE,...", "of %(default)s (default: all)", default=",".join(MODES))
        add("--seconds S", "length of a window after the first tokens (default %(default)g)", default=15.0)
        add("--repeats N", "windows for each number and mode, in turns (default %(default)s)", default=3)
        options.add_question_options(parser, required=False)
        options.add_bundle_options(parser)
        options.add_target_options(parser)
        options.add_server_options(parser)
        add(
            "--engine NAME,NAME,...",
            f"engine of the target in the verifier, of {','.join(ENGINES)}; several are compared in one run "
            f"(default: {ENGINES[0]})",
        )
        options.add_answer_options(parser, max_new_tokens=256)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        sessions = options.numbers_of("--sessions", args.sessions, 1, _MOST_SESSIONS)
        modes = options.names_of("--modes", "mode", args.modes, MODES)
        engines = [] if args.engine is None else options.names_of("--engine", "engine", args.engine, ENGINES)
        if not 0 < args.seconds < math.inf:
            raise MoaError(f"--seconds must be above 0 and finite, not {args.seconds:g}", code="out_of_range")
        options.check_at_least(args, repeats=1, max_new_tokens=1)
        if isinstance(args.draft_length, int):
            options.numbers_of("--draft-length", str(args.draft_length), 1, Limits().max_draft_tokens)
        sampling, endpoint = options.sampling_of(args), options.endpoint_of(args)
        if endpoint is not None and engines:
            text = "--engine belongs to a verifier that is started here: leave out --server"
            raise MoaError(text, code="contradiction")
        questions, bundle = options.questions_of(args), options.bundle_of(args)
        prompts, skipped = prompts_of(questions, ChatTokenizer.from_bundle(bundle), bundle.manifest.max_context)
        order = schedule(sessions, args.repeats, modes, engines or [""])
        # No window pays for work that is done once.
        warm_ups = [Load(sessions[-1], mode, engine) for engine in engines or [""] for mode in modes]
        # Conversations are forgotten as soon as they are left, but perhaps not before a client begins its next.
        serving = ["--keep-seconds", "0", "--max-sessions", str(2 * sessions[-1])]
        wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
        windows: dict[Load, list[WindowResult]] = {}
        with ExitStack() as running:
            scratch = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="moa-bench-")))
            tokens = iter([None] * (len(warm_ups) + len(order)))
            if endpoint is None:
                tokens = iter(write_tokens(scratch / "tokens.json", [*warm_ups, *order]))
                serving += ["--token-file", str(scratch / "tokens.json")]
            opened = open_verifiers(engines or [""], endpoint, **wanted, options=serving)
            verifiers = running.enter_context(opened)
            client_cpus, pinned = available_cpus(), all(verifier.pinned for verifier in verifiers.values())
            settings = AnswerSettings(args.draft_length, args.max_new_tokens, sampling)
            fleet = running.enter_context(open_fleet(sessions[-1], bundle.folder, prompts, settings))
            for load, token in zip(warm_ups, tokens, strict=False):
                measure_window(load, _WARM_UP_S, verifiers[load.engine], fleet, token)
            measured = Measured(
                lambda: {**figures_of(windows, args.seconds, client_cpus), "skipped": skipped},
                {
                    "sessions": sessions,
                    "modes": modes,
                    "engines": engines,
                    "seconds": args.seconds,
                    "repeats": args.repeats,
                    **options.question_settings(args),
                    "target": bundle.manifest.target,
                    "dtype": args.dtype,
                    "draft_length": args.draft_length,
                    "max_new_tokens": args.max_new_tokens,
                    "sampling": dataclasses.asdict(sampling),
                    "own_verifier": endpoint is None,
                    "client_cpus": client_cpus,
                    "pinned": pinned,
                },
                bundle.manifest.fingerprints,
            )
            yield measured
            loads = Progress(zip(order, tokens, strict=True), total=len(order), desc="server", unit="window")
            for load, token in loads:
                found = measure_window(load, args.seconds, verifiers[load.engine], fleet, token)
                windows.setdefault(load, []).append(found)
                yield measured

    def tables(self, result: Result) -> list[Table]:
        engines = result["settings"]["engines"]
        base = f"{engines[0]} stream" if len(engines) > 1 else "stream"
        rows = []
        for count, modes in result["sessions"].items():
            for mode, load in modes.items():
                low, high = (format_cell(end(load["tokens_per_s_by_window"])) for end in (min, max))
                speed = [count, mode, load["tokens_per_s"], f"{low} - {high}", load["tokens_per_cpu_s"]]
                times = [*load["ms_per_token"].values(), *load["ttft_ms"].values()]
                rows.append([*speed, *times, *map(load.get, _LAST_FIGURES)])
        compared = [
            [count, mode, *map(each.get, (*_COMPARED, "bound", "of_bound"))]
            for count, modes in result["by_stream"].items()
            for mode, each in modes.items()
        ]
        return [
            Table(_HEADER, rows),
            Table(
                ["sessions", "mode", *_COMPARED.values(), "bound", "of the bound"],
                compared,
                title=f"by {base}, medians over windows",
                note="\n".join([_conditions(result), *skipped_notes(result)]),
            ),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw tokens per second and the slow end of latency, against the number of sessions."""
        speed, latency = figure.subplots(1, 2)
        plot_by_sessions(speed, result, lambda load: load["tokens_per_s"])
        plot_by_sessions(latency, result, lambda load: load["ms_per_token"]["p95"])
        ticks = [int(count) for count in result["sessions"]]
        common = {"xlabel": "sessions", "xticks": ticks, "ylim": (0, None)}
        speed.set(title="all sessions together", ylabel="tokens/s", **common)
        latency.set(title="as a session sees it", ylabel="ms/token, p95", **common)
        if ticks:
            speed.legend()


# -- measuring -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A number of clients at work in one mode; ``engine`` is empty unless several are compared."""

    clients: int
    mode: str
    engine: str = ""

    @property
    def name(self) -> str:
        """Key of its figures among those of as many clients."""
        return f"{self.engine} {self.mode}" if self.engine else self.mode


@dataclass(frozen=True)
class WindowResult:
    """The outcome of one window.

    Attributes:
        begin: seconds of :func:`time.perf_counter`; of what clients recorded, tokens up to then do not count.
        passes: forward passes of the target within it.
        peak_memory: of the verifier's process, bytes; None if it was not started here.
        cpu_s: processor time of that process within it, seconds; None likewise.
        bound: of drafting, see :func:`moa_bench.draft_bound.draft_bound`; None if the verifier does not tell its costs.
    """

    begin: float
    clients: list[ClientRecord]
    passes: int
    peak_memory: int | None
    cpu_s: float | None = None
    bound: float | None = None


def write_tokens(path: Path, loads: Sequence[Load]) -> list[str]:
    """Write a token file with a bearer for each window and return their tokens: prompts are shared within a bearer, so
    each window computes its own. The verifier does not draft for those of ``stream``."""
    tokens = [secrets.token_urlsafe(24) for _ in loads]
    entries = [
        {"name": f"window-{number}", "sha256": digest(token), **(_NO_DRAFTS if load.mode == "stream" else {})}
        for number, (load, token) in enumerate(zip(loads, tokens, strict=True))
    ]
    path.write_text(json.dumps({"tokens": entries}))
    path.chmod(0o600)
    return tokens


def schedule(
    sessions: Sequence[int], repeats: int, modes: Sequence[str] = MODES, engines: Sequence[str] = ("",)
) -> list[Load]:
    """Return every load ``repeats`` times, modes and engines in turn, each repetition in the other order, so that drift
    of the machine affects all of them alike."""
    order = []
    for repeat in range(repeats):
        turn = [(mode, engine) for mode in modes for engine in engines][:: 1 if repeat % 2 == 0 else -1]
        order += [Load(clients, mode, engine) for clients in sessions for mode, engine in turn]
    return order


def measure_window(
    load: Load, seconds: float, verifier: Verifier, fleet: Fleet, token: str | None = None
) -> WindowResult:
    """Let the clients of a load work until each has a first token, then for a window of ``seconds``, with a bearer
    ``token`` if one is given. Raises VerifierGoneError: the verifier has ended; MoaError: a client has ended, or was
    refused."""
    import psutil

    _await_forgetting(verifier)
    for_clients = verifier if token is None else replace(verifier, endpoint=replace(verifier.endpoint, token=token))
    try:
        process = None if verifier.pid is None else psutil.Process(verifier.pid)
        fleet.begin(load.clients, Window(load.mode, for_clients))
        peak, cpu_before = None, None if process is None else process.cpu_times()
        before, begin, step_ms = verifier.status(), time.perf_counter(), None
        end = begin + seconds
        fleet.end_at(end)
        while (left := end - time.perf_counter()) > 0:
            if process is not None:
                peak = max(resident_memory(process), peak or 0)
            if step_ms is None and left < seconds / 2:  # costs of steps with all these sessions
                step_ms = verifier.status().get("step_cost", {})
            if fleet.wait_for_any(min(left, _SAMPLE_EVERY_S)):  # a client that ends early has failed
                break
        after, cpu_s = verifier.status(), None
        if process is not None:
            cpu_after = process.cpu_times()
            cpu_s = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    except psutil.NoSuchProcess as error:
        raise VerifierGoneError(_GONE, code="verifier_gone") from error
    bound = None
    if "acceptance" in after:
        counts = {name: np.subtract(each, before["acceptance"][name]) for name, each in after["acceptance"].items()}
        bound = draft_bound(load.clients, step_ms or {}, counts.pop("rounds"), counts)
    return WindowResult(begin, fleet.collect(), after["forwards"] - before["forwards"], peak, cpu_s, bound)


def _await_forgetting(verifier: Verifier) -> None:
    """Wait until a verifier started here holds no conversation of an earlier window, and so none of its memory."""
    if verifier.pid is None:
        return
    give_up = time.monotonic() + _LONGEST_FORGETTING_S
    while verifier.status()["sessions"]:
        if time.monotonic() > give_up:
            text = f"the verifier still held conversations after {_LONGEST_FORGETTING_S:g} s"
            raise MoaError(text, code="timeout")
        time.sleep(_SAMPLE_EVERY_S)


def resident_memory(process: psutil.Process) -> int:
    """Return the resident set of the verifier's process, bytes. Raises VerifierGoneError if it has ended."""
    resident = int(process.memory_info().rss)
    if resident == 0:  # ended, and not waited for yet
        raise VerifierGoneError(_GONE, code="verifier_gone")
    return resident


# -- figures ---------------------------------------------------------------------------------------------


def figures_of(
    windows: Mapping[Load, Sequence[WindowResult]], seconds: float, client_cpus: int
) -> dict[str, dict[str, Any]]:
    """Return ``sessions.<N>.<mode>``, and ``by_stream.<N>``: figures of each other mode by those streamed.

    If several engines are compared, the mode is ``<engine> <mode>``, and all are compared with the first one's
    streaming.

    Args:
        seconds: of each window.
        client_cpus: processors that all clients share.
    """
    sessions: dict[str, dict[str, Any]] = {}
    for load, results in windows.items():
        sessions.setdefault(str(load.clients), {})[load.name] = _load_figures(load, results, seconds, client_cpus)
    base = next((load.name for load in windows if load.mode == "stream"), "")
    return {
        "sessions": sessions,
        "by_stream": {clients: _by_stream(modes, base) for clients, modes in sessions.items()},
    }


def _load_figures(load: Load, windows: Sequence[WindowResult], seconds: float, client_cpus: int) -> dict[str, Any]:
    """Sum up all windows of one load; the description of the benchmark explains the figures."""
    clients = [client for window in windows for client in window.clients]
    answers = [answer for client in clients for answer in client.answers]
    begun = [answer for answer in answers if answer.bursts]
    first_tokens = [answer.first_s for answer in begun]
    latencies = [latency for window in windows for latency in _latencies(window)]
    bursts = [_bursts(window) for window in windows]
    verdicts = sum(len(answer) - 1 for window in windows for answer in _counted(window))
    by_window = [sum(burst.tokens for burst in each) for each in bursts]
    tokens = sum(by_window)
    memories = [window.peak_memory for window in windows if window.peak_memory is not None]
    cpu_s = sum(window.cpu_s or 0.0 for window in windows)
    time_measured, passes = seconds * len(windows), sum(window.passes for window in windows)
    bounds = [window.bound for window in windows if window.bound is not None]
    return {
        "tokens": tokens,
        "answers": len(answers),
        "tokens_per_s": rounded(tokens / time_measured),
        "tokens_per_s_by_window": [rounded(count / seconds) for count in by_window],
        "tokens_per_cpu_s": ratio(tokens, cpu_s),
        "tokens_per_cpu_s_by_window": [
            ratio(count, window.cpu_s or 0.0) for count, window in zip(by_window, windows, strict=True)
        ],
        "ms_per_token": latency_ms(latencies),
        "ms_per_token_by_window": [mean_ms(_latencies(window)) for window in windows],
        "ttft_ms": {"mean": mean_ms(first_tokens), "p95": percentile_ms(first_tokens, 95)},
        "passes_per_token": ratio(passes, tokens),
        "sessions_per_pass": ratio(sum(map(len, bursts)), passes),
        "tokens_per_round": ratio(len(latencies), verdicts) if load.mode != "stream" else None,
        "peak_memory_mb": round(max(memories) / 1e6, 1) if memories else None,
        "client_cpu_share": rounded(sum(client.cpu_s for client in clients) / (time_measured * client_cpus)),
        "bound": rounded(median(bounds)) if bounds else None,
    }


def _counted(window: WindowResult) -> list[list[Burst]]:
    """Bursts of each answer within the window, after the last one before it if there is one."""
    begun = [answer.bursts for client in window.clients for answer in client.answers if answer.bursts]
    firsts = [bisect_right(bursts, window.begin, key=attrgetter("at")) for bursts in begun]
    return [bursts[max(0, first - 1) :] for bursts, first in zip(begun, firsts, strict=True)]


def _bursts(window: WindowResult) -> list[Burst]:
    return [burst for bursts in _counted(window) for burst in bursts if burst.at > window.begin]


def _latencies(window: WindowResult) -> list[float]:
    return [each for bursts in _counted(window) for each in token_latencies(bursts)]


def _by_stream(modes: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, dict[str, float | None]]:
    """Compare each other mode with ``base``, window by window, without those that wrote nothing."""
    if not modes.get(base, {}).get("tokens"):
        return {}
    found: dict[str, dict[str, float | None]] = {}
    for mode, figures in modes.items():
        if mode == base or not figures["tokens"]:
            continue
        windows = {name: (figures[f"{name}_by_window"], modes[base][f"{name}_by_window"]) for name in _COMPARED}
        # Some windows of an interrupted run have no partner.
        ratios = {
            name: [mine / streamed for mine, streamed in zip(*both, strict=False) if mine and streamed]
            for name, both in windows.items()
        }
        against = {name: rounded(median(each)) if each else None for name, each in ratios.items()}
        gained = against["tokens_per_cpu_s"] or against["tokens_per_s"]
        of_bound = ratio(gained, figures["bound"] or 0.0) if gained else None
        found[mode] = {**against, "bound": figures["bound"], "of_bound": of_bound}
    return found


def plot_by_sessions(axes: Axes, result: Result, figure: Callable[[dict[str, Any]], float | None]) -> None:
    """Draw a line of one figure by the number of sessions for each mode; a figure of None has no point."""
    for mode in dict.fromkeys(mode for modes in result["sessions"].values() for mode in modes):
        points = [(int(count), figure(modes[mode])) for count, modes in result["sessions"].items() if mode in modes]
        known = [point for point in points if point[1] is not None]
        axes.plot([count for count, _ in known], [value for _, value in known], marker="o", label=mode)


def _conditions(result: Result) -> str:
    settings = result["settings"]
    apart, most = "" if settings["pinned"] else "not ", "at most " if result["partial"] else ""
    return (
        f"{most}{settings['repeats']} windows of {settings['seconds']:g} s each, "
        f"draft length {settings['draft_length']}, {sampling_note(settings['sampling'])}, "
        f"answers of at most {settings['max_new_tokens']} tokens; "
        f"processors for all clients: {settings['client_cpus']}, {apart}kept apart from the verifier's"
    )
