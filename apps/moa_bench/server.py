"""``moa-bench server``: many sessions at once on one verifier, for each way in which they are served."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, format_cell, sampling_note, skipped_notes
from moa_bench.questions import prompts_of
from moa_bench.result import mean_ms, percentile_ms, ratio, rounded, token_latencies
from moa_bench.server_clients import ClientRecord, Fleet, Window, Workload, open_fleet
from moa_bench.verifier import Verifier, VerifierGoneError, open_verifier, open_verifiers
from moa_runtime.errors import MoaError
from moa_runtime.options import available_cpus
from moa_runtime.session.handshake import Limits
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.settings import ENGINES, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = ("auto", "device", "server", "stream")
_MOST_SESSIONS = Settings().max_sessions
_WARM_UP_S = 2.0
_SAMPLE_EVERY_S = 0.05
_LONGEST_FORGETTING_S = 30.0
_HEADER = [
    "sessions",
    "mode",
    "tokens/s",
    "by window",
    "tokens/CPU s",
    "ms/token",
    "p50",
    "p95",
    "first token ms",
    "p95",
    "passes/token",
    "tokens/round",
    "peak MB",
    "client CPU",
]


class Server(Benchmark):
    """CostModel and latency of many sessions at once."""

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
        parser.add_argument(
            "--sessions",
            default="1,4,8",
            metavar="N,N,...",
            help=f"numbers of sessions at once, each from 1 to {_MOST_SESSIONS} (default %(default)s)",
        )
        parser.add_argument(
            "--modes", default=",".join(MODES), metavar="MODE,MODE,...", help="of %(default)s (default: all)"
        )
        parser.add_argument(
            "--seconds", type=float, default=15.0, metavar="S", help="length of a window (default %(default)g)"
        )
        parser.add_argument(
            "--repeats", type=int, default=2, metavar="N", help="windows for each number and mode (default %(default)s)"
        )
        options.add_question_options(parser, required=False)
        options.add_bundle_option(parser)
        options.add_target_options(parser)
        options.add_server_options(parser)
        parser.add_argument(
            "--engine",
            metavar="NAME,NAME,...",
            help=f"engine of the target in the verifier, of {','.join(ENGINES)}; several are compared in one run "
            f"(default: {ENGINES[0]})",
        )
        options.add_draft_length_option(parser)
        options.add_answer_options(parser, max_new_tokens=64)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        sessions, modes = sessions_of(args.sessions), options.names_of("--modes", "mode", args.modes, MODES)
        engines = [] if args.engine is None else options.names_of("--engine", "engine", args.engine, ENGINES)
        _check_numbers(args)
        sampling, endpoint = options.sampling_of(args), options.endpoint_of(args)
        if endpoint is not None and engines:
            raise MoaError("--engine belongs to a verifier that is started here: leave out --server")
        questions, bundle = options.questions_of(args), options.bundle_of(args)
        prompts, skipped = prompts_of(questions, ChatTokenizer.from_bundle(bundle), bundle.manifest.max_context)
        # Conversations are forgotten as soon as they are left, but perhaps not before a client begins its next.
        serving = ("--keep-seconds", "0", "--max-sessions", str(2 * sessions[-1]))
        wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
        windows: dict[Load, list[WindowResult]] = {}
        with ExitStack() as running:
            verifiers = (
                running.enter_context(open_verifiers(engines, **wanted, options=serving))
                if engines
                else {"": running.enter_context(open_verifier(endpoint, **wanted, options=serving))}
            )
            client_cpus, pinned = available_cpus(), all(verifier.pinned for verifier in verifiers.values())
            work = Workload(prompts, args.draft_length, args.max_new_tokens, sampling)
            fleet = running.enter_context(open_fleet(sessions[-1], bundle.folder, work))
            warm_up(verifiers, fleet, modes)
            measured = Measured(
                lambda: {
                    **figures_of(windows, args.seconds, client_cpus),
                    "skipped": [dataclasses.asdict(question) for question in skipped],
                },
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
            for _ in measure_windows(loads, args.seconds, verifiers, fleet, windows):
                yield measured

    def tables(self, result: Result) -> list[Table]:
        rows = [_row(count, mode, load) for count, modes in result["sessions"].items() for mode, load in modes.items()]
        drafting = list(dict.fromkeys(mode for modes in result["speedup"].values() for mode in modes))
        return [
            Table(_HEADER, rows),
            Table(
                ["sessions", *drafting],
                [[count, *map(modes.get, drafting)] for count, modes in result["speedup"].items()],
                title=f"tokens/s by those of {_base(result)}",
                note="\n".join([_conditions(result), *skipped_notes(result)]),
            ),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw tokens per second and the slow end of latency, against the number of sessions."""
        speed, latency = figure.subplots(1, 2)
        for mode in dict.fromkeys(mode for modes in result["sessions"].values() for mode in modes):
            loads = [(int(count), modes[mode]) for count, modes in result["sessions"].items() if mode in modes]
            _line(speed, mode, [(count, load["tokens_per_s"]) for count, load in loads])
            _line(latency, mode, [(count, load["ms_per_token"]["p95"]) for count, load in loads])
        ticks = [int(count) for count in result["sessions"]]
        common = {"xlabel": "sessions", "xticks": ticks, "ylim": (0, None)}
        speed.set(title="all sessions together", ylabel="tokens/s", **common)
        latency.set(title="as a session sees it", ylabel="ms/token, p95", **common)
        if ticks:
            speed.legend()


def sessions_of(text: str) -> list[int]:
    """Parse ``"8,1,4,4"`` to ``[1, 4, 8]``. Raises MoaError for anything else, or a number out of range."""
    try:
        sessions = sorted({int(number) for number in text.split(",")})
    except ValueError:
        sessions = []
    if not sessions or sessions[0] < 1 or sessions[-1] > _MOST_SESSIONS:
        raise MoaError(
            f"--sessions {text}: expected numbers from 1 to {_MOST_SESSIONS} with commas between, such as 1,4,8"
        )
    return sessions


def _check_numbers(args: argparse.Namespace) -> None:
    if not 0 < args.seconds < math.inf:
        raise MoaError(f"--seconds must be above 0, not {args.seconds:g}")
    options.check_at_least(args, repeats=1, max_new_tokens=1)
    longest_draft = Limits().max_draft_tokens
    if isinstance(args.draft_length, int) and not 1 <= args.draft_length <= longest_draft:
        raise MoaError(f"--draft-length must be 1 to {longest_draft} tokens, not {args.draft_length}")


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


def warm_up(verifiers: Mapping[str, Verifier], fleet: Fleet, modes: Sequence[str] = MODES) -> None:
    """Let every client work for a moment in each mode with each verifier: no window pays for work that is done once.

    Raises:
        MoaError: bundle and verifier do not belong together, or a client fails.
    """
    for engine, verifier in verifiers.items():
        for mode in modes:
            _measure_window(Load(len(fleet.processes), mode, engine), _WARM_UP_S, verifier, fleet)


def measure_windows(
    loads: Iterable[Load],
    seconds: float,
    verifiers: Mapping[str, Verifier],
    fleet: Fleet,
    windows: dict[Load, list[WindowResult]],
) -> Generator[None, None, None]:
    """Measure one window for every load into ``windows``, whole ones only; yields after each.

    Args:
        verifiers: by engine, as the loads have it.

    Raises:
        VerifierGoneError: the verifier has ended.
        MoaError: a client has ended, or was refused.
    """
    for load in loads:
        found = _measure_window(load, seconds, verifiers[load.engine], fleet)
        windows.setdefault(load, []).append(found)
        yield


def _measure_window(load: Load, seconds: float, verifier: Verifier, fleet: Fleet) -> WindowResult:
    _await_forgetting(verifier)
    process = VerifierProcess(verifier.pid)
    before, cpu_before = verifier.forwards(), process.cpu_seconds()
    end = time.monotonic() + seconds
    fleet.begin(load.clients, Window(load.mode, seconds, verifier.endpoint, verifier.http_url))
    while (left := end - time.monotonic()) > 0:
        process.sample_memory()
        if fleet.wait_for_any(min(left, _SAMPLE_EVERY_S)):  # a client that ends early has failed
            break
    passes, cpu_after = verifier.forwards() - before, process.cpu_seconds()
    cpu_s = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    return WindowResult(fleet.collect(), passes, process.peak_memory, cpu_s)


def _await_forgetting(verifier: Verifier) -> None:
    """Wait until a verifier started here holds no conversation of an earlier window, and so none of its memory."""
    if verifier.pid is None:
        return
    give_up = time.monotonic() + _LONGEST_FORGETTING_S
    while verifier.status()["sessions"]:
        if time.monotonic() > give_up:
            raise MoaError(f"the verifier still held conversations after {_LONGEST_FORGETTING_S:g} s")
        time.sleep(_SAMPLE_EVERY_S)


class VerifierProcess:
    """Memory and processor time of the verifier's process.

    Args:
        pid: None for a verifier that was not started here, of which neither is known.

    Attributes:
        peak_memory: largest resident set of the samples, bytes; None before the first.
    """

    def __init__(self, pid: int | None) -> None:
        import psutil

        self.peak_memory: int | None = None
        self._process = None if pid is None else psutil.Process(pid)

    def sample_memory(self) -> None:
        """Raises VerifierGoneError if the process has ended."""
        if self._process is None:
            return
        resident = self._process.memory_info().rss
        if resident == 0:  # ended, and not waited for yet
            raise VerifierGoneError("the verifier ended in the middle of the measurement")
        self.peak_memory = max(resident, self.peak_memory or 0)

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all threads so far. Raises VerifierGoneError if the process has ended."""
        if self._process is None:
            return None
        import psutil

        try:
            times = self._process.cpu_times()
        except psutil.NoSuchProcess:
            raise VerifierGoneError("the verifier ended in the middle of the measurement") from None
        return float(times.user + times.system)


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
    first_tokens = [answer.bursts[0].at - answer.asked_at for answer in begun]
    latencies = [latency for answer in begun for latency in token_latencies(answer.bursts)]
    verdicts = sum(len(answer.bursts) - 1 for answer in begun)
    by_window = [_tokens(window) for window in windows]
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
        "ms_per_token": {
            "mean": mean_ms(latencies),
            "p50": percentile_ms(latencies, 50),
            "p95": percentile_ms(latencies, 95),
        },
        "ttft_ms": {"mean": mean_ms(first_tokens), "p95": percentile_ms(first_tokens, 95)},
        "passes_per_token": ratio(sum(window.passes for window in windows), tokens),
        "tokens_per_round": ratio(len(latencies), verdicts) if load.mode != "stream" else None,
        "peak_memory_mb": round(max(memories) / 1e6, 1) if memories else None,
        "client_cpu_share": rounded(sum(client.cpu_s for client in clients) / (time_measured * client_cpus)),
    }


def _tokens(window: WindowResult) -> int:
    return sum(burst.tokens for client in window.clients for answer in client.answers for burst in answer.bursts)


def _speedup(modes: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, float]:
    """Compare each other mode with ``base``, without those that wrote nothing."""
    speeds = {mode: figures["tokens_per_s"] for mode, figures in modes.items() if figures.get("tokens_per_s")}
    streamed = speeds.pop(base, None)
    return {} if streamed is None else {mode: round(speed / streamed, 4) for mode, speed in speeds.items()}


def _base(result: Result) -> str:
    """Name the load that the others are compared with."""
    engines = result["settings"]["engines"]
    return f"{engines[0]} stream" if len(engines) > 1 else "stream"


def _line(axes: Any, mode: str, points: list[tuple[int, float | None]]) -> None:
    known = [(count, figure) for count, figure in points if figure is not None]
    axes.plot([count for count, _ in known], [figure for _, figure in known], marker="o", label=mode)


def _row(count: str, mode: str, load: dict[str, Any]) -> list[object]:
    windows = load["tokens_per_s_by_window"]
    return [
        count,
        mode,
        load["tokens_per_s"],
        f"{format_cell(min(windows))} - {format_cell(max(windows))}",
        load["tokens_per_cpu_s"],
        *(load["ms_per_token"][name] for name in ("mean", "p50", "p95")),
        *(load["ttft_ms"][name] for name in ("mean", "p95")),
        *(load[name] for name in ("passes_per_token", "tokens_per_round", "peak_memory_mb", "client_cpu_share")),
    ]


def _conditions(result: Result) -> str:
    settings = result["settings"]
    apart = "" if settings["pinned"] else "not "
    return (
        f"{settings['repeats']} windows of {settings['seconds']:g} s each, draft length {settings['draft_length']}, "
        f"{sampling_note(settings['sampling'])}, answers of at most {settings['max_new_tokens']} tokens; "
        f"processors for all clients: {settings['client_cpus']}, {apart}kept apart from the verifier's"
    )
