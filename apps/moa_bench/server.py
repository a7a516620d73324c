"""``moa-bench server``: many sessions at once on one verifier, for each way in which they are served."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, format_cell, sampling_note, skipped_notes
from moa_bench.questions import prompts_of
from moa_bench.result import latency_ms, mean_ms, percentile_ms, ratio, rounded, token_latencies
from moa_bench.server_clients import ClientRecord, Fleet, Window, open_fleet
from moa_bench.serving import AnswerSettings
from moa_bench.verifier import Verifier, VerifierGoneError, open_verifiers
from moa_runtime.errors import MoaError
from moa_runtime.options import available_cpus
from moa_runtime.session.handshake import Limits
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.settings import ENGINES, Settings

if TYPE_CHECKING:
    import psutil
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = ("auto", "device", "server", "stream")
_MOST_SESSIONS = Settings().max_sessions
_WARM_UP_S = 2.0
_GONE = "the verifier ended in the middle of the measurement"
_SAMPLE_EVERY_S = 0.05
_LONGEST_FORGETTING_S = 30.0
_HEADER = ("sessions", "mode", "tokens/s", "by window", "tokens/CPU s", "ms/token", "p50", "p95")
_HEADER += ("first token ms", "p95", "passes/token", "tokens/round", "peak MB", "client CPU")
_LAST_FIGURES = ("passes_per_token", "tokens_per_round", "peak_memory_mb", "client_cpu_share")


class Server(Benchmark):
    """Throughput and latency of many sessions at once."""

    name = "server"
    purpose = "The cost of many sessions at once for the verifier."
    summary = "many sessions at once: drafting against streaming"
    description = """\
Measure the service of N sessions at once by one verifier, for each way in which they are served: chats that draft on
the device, on the server, or wherever it is faster (auto), and plain decoding that is streamed.

Each session is a client in a process of its own. In a window all clients begin together and ask one question
after the other, each in a new conversation, until the window is over; unfinished answers are then given up.
Only committed tokens that arrived within the window count. In all modes a client asks the same questions in
the same order. Verifier and clients have processors of their own if the machine has two or more.

tokens_per_s      of all sessions together
tokens_per_cpu_s  by processor seconds of the verifier's process, all of its threads; null with --server
ms_per_token      as one session sees it: k tokens that arrive t ms after those before them took t / k ms each;
                  the first token of an answer is left out
ttft_ms           from sending a question to its first token, of answers that began within the window
passes_per_token  forward passes of the target, prompts included, by tokens; passes whose tokens arrive just
                  outside the window blur it
tokens_per_round  committed by one verdict; null when streaming
peak_memory_mb    the verifier's largest resident set, in 10^6 bytes; null with --server
client_cpu_share  processor time of all clients by that of the processors they share; near 1 the clients, not the
                  verifier, limit the figures: real devices would not share processors
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        add(
            "--sessions N,N,...",
            f"numbers of sessions at once, each from 1 to {_MOST_SESSIONS} (default %(default)s)",
            default="1,4,8",
        )
        add("--modes MODE,MODE,...", "of %(default)s (default: all)", default=",".join(MODES))
        add("--seconds S", "length of a window (default %(default)g)", default=15.0)
        add("--repeats N", "windows for each number and mode (default %(default)s)", default=2)
        options.add_question_options(parser, required=False)
        options.add_bundle_options(parser)
        options.add_target_options(parser)
        options.add_server_options(parser)
        add(
            "--engine NAME,NAME,...",
            f"engine of the target in the verifier, of {','.join(ENGINES)}; several are compared in one run "
            f"(default: {ENGINES[0]})",
        )
        options.add_answer_options(parser, max_new_tokens=64)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        sessions = options.numbers_of("--sessions", args.sessions, 1, _MOST_SESSIONS)
        modes = options.names_of("--modes", "mode", args.modes, MODES)
        engines = [] if args.engine is None else options.names_of("--engine", "engine", args.engine, ENGINES)
        if not 0 < args.seconds < math.inf:
            raise MoaError(f"--seconds must be above 0, not {args.seconds:g}", code="out_of_range")
        options.check_at_least(args, repeats=1, max_new_tokens=1)
        if isinstance(args.draft_length, int):
            options.numbers_of("--draft-length", str(args.draft_length), 1, Limits().max_draft_tokens)
        sampling, endpoint = options.sampling_of(args), options.endpoint_of(args)
        if endpoint is not None and engines:
            text = "--engine belongs to a verifier that is started here: leave out --server"
            raise MoaError(text, code="contradiction")
        questions, bundle = options.questions_of(args), options.bundle_of(args)
        prompts, skipped = prompts_of(questions, ChatTokenizer.from_bundle(bundle), bundle.manifest.max_context)
        # Conversations are forgotten as soon as they are left, but perhaps not before a client begins its next.
        serving = ("--keep-seconds", "0", "--max-sessions", str(2 * sessions[-1]))
        wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
        windows: dict[Load, list[WindowResult]] = {}
        with ExitStack() as running:
            opened = open_verifiers(engines or [""], endpoint, **wanted, options=serving)
            verifiers = running.enter_context(opened)
            client_cpus, pinned = available_cpus(), all(verifier.pinned for verifier in verifiers.values())
            settings = AnswerSettings(args.draft_length, args.max_new_tokens, sampling)
            fleet = running.enter_context(open_fleet(sessions[-1], bundle.folder, prompts, settings))
            for engine, verifier in verifiers.items():
                for mode in modes:  # no window pays for work that is done once
                    measure_window(Load(sessions[-1], mode, engine), _WARM_UP_S, verifier, fleet)
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
            loads = Progress(schedule(sessions, args.repeats, modes, tuple(verifiers)), desc="server", unit="window")
            for load in loads:
                found = measure_window(load, args.seconds, verifiers[load.engine], fleet)
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
        drafting = list(dict.fromkeys(mode for modes in result["speedup"].values() for mode in modes))
        return [
            Table(_HEADER, rows),
            Table(
                ["sessions", *drafting],
                [[count, *map(modes.get, drafting)] for count, modes in result["speedup"].items()],
                title=f"tokens/s by those of {base}",
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
        passes: forward passes of the target within it.
        peak_memory: of the verifier's process, bytes; None if it was not started here.
        cpu_s: processor time of that process within it, seconds; None likewise.
    """

    clients: list[ClientRecord]
    passes: int
    peak_memory: int | None
    cpu_s: float | None = None


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


def measure_window(load: Load, seconds: float, verifier: Verifier, fleet: Fleet) -> WindowResult:
    """Let the clients of a load work for a window. Raises VerifierGoneError: the verifier has ended; MoaError: a client
    has ended, or was refused."""
    import psutil

    _await_forgetting(verifier)
    try:
        process = None if verifier.pid is None else psutil.Process(verifier.pid)
        peak, cpu_before = None, None if process is None else process.cpu_times()
        before, end = verifier.forwards(), time.monotonic() + seconds
        fleet.begin(load.clients, Window(load.mode, seconds, verifier))
        while (left := end - time.monotonic()) > 0:
            if process is not None:
                peak = max(resident_memory(process), peak or 0)
            if fleet.wait_for_any(min(left, _SAMPLE_EVERY_S)):  # a client that ends early has failed
                break
        passes, cpu_s = verifier.forwards() - before, None
        if process is not None:
            cpu_after = process.cpu_times()
            cpu_s = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    except psutil.NoSuchProcess as error:
        raise VerifierGoneError(_GONE, code="verifier_gone") from error
    return WindowResult(fleet.collect(), passes, peak, cpu_s)


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
    """Return ``sessions.<N>.<mode>``, and ``speedup.<N>``: tokens per second of each other mode over those streamed.

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
    return {"sessions": sessions, "speedup": {clients: _speedup(modes, base) for clients, modes in sessions.items()}}


def _load_figures(load: Load, windows: Sequence[WindowResult], seconds: float, client_cpus: int) -> dict[str, Any]:
    """Sum up all windows of one load; the description of the benchmark explains the figures."""
    clients = [client for window in windows for client in window.clients]
    answers = [answer for client in clients for answer in client.answers]
    begun = [answer for answer in answers if answer.bursts]
    first_tokens = [answer.first_s for answer in begun]
    latencies = [latency for answer in begun for latency in token_latencies(answer.bursts)]
    verdicts = sum(len(answer.bursts) - 1 for answer in begun)
    by_window = [
        sum(burst.tokens for client in window.clients for answer in client.answers for burst in answer.bursts)
        for window in windows
    ]
    tokens = sum(by_window)
    memories = [window.peak_memory for window in windows if window.peak_memory is not None]
    cpu_s = sum(window.cpu_s or 0.0 for window in windows)
    time_measured = seconds * len(windows)
    return {
        "tokens": tokens,
        "answers": len(answers),
        "tokens_per_s": rounded(tokens / time_measured),
        "tokens_per_s_by_window": [rounded(count / seconds) for count in by_window],
        "tokens_per_cpu_s": ratio(tokens, cpu_s),
        "ms_per_token": latency_ms(latencies),
        "ttft_ms": {"mean": mean_ms(first_tokens), "p95": percentile_ms(first_tokens, 95)},
        "passes_per_token": ratio(sum(window.passes for window in windows), tokens),
        "tokens_per_round": ratio(len(latencies), verdicts) if load.mode != "stream" else None,
        "peak_memory_mb": round(max(memories) / 1e6, 1) if memories else None,
        "client_cpu_share": rounded(sum(client.cpu_s for client in clients) / (time_measured * client_cpus)),
    }


def _speedup(modes: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, float]:
    """Compare each other mode with ``base``, without those that wrote nothing."""
    speeds = {mode: figures["tokens_per_s"] for mode, figures in modes.items() if figures.get("tokens_per_s")}
    streamed = speeds.pop(base, None)
    return {} if streamed is None else {mode: round(speed / streamed, 4) for mode, speed in speeds.items()}


def plot_by_sessions(axes: Axes, result: Result, figure: Callable[[dict[str, Any]], float | None]) -> None:
    """Draw a line of one figure by the number of sessions for each mode; a figure of None has no point."""
    for mode in dict.fromkeys(mode for modes in result["sessions"].values() for mode in modes):
        points = [(int(count), figure(modes[mode])) for count, modes in result["sessions"].items() if mode in modes]
        known = [point for point in points if point[1] is not None]
        axes.plot([count for count, _ in known], [value for _, value in known], marker="o", label=mode)


def _conditions(result: Result) -> str:
    settings = result["settings"]
    apart = "" if settings["pinned"] else "not "
    return (
        f"{settings['repeats']} windows of {settings['seconds']:g} s each, draft length {settings['draft_length']}, "
        f"{sampling_note(settings['sampling'])}, answers of at most {settings['max_new_tokens']} tokens; "
        f"processors for all clients: {settings['client_cpus']}, {apart}kept apart from the verifier's"
    )
