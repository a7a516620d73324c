"""``moa-bench network``: the cost of an answer over a network, for each way of serving the same target."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, sampling_note, skipped_notes
from moa_bench.link.profiles import PROFILES, LinkProfile, get_profile
from moa_bench.link.wire import read_trace
from moa_bench.questions import Prompt, prompts_of
from moa_bench.result import mean_ms, percentile_ms, ratio, token_latencies
from moa_bench.serving import (
    MODES,
    AnswerSettings,
    CutAnswer,
    CutSettings,
    Mode,
    Outcome,
    Turn,
    ask,
    ask_and_cut,
    figures_of,
    make_modes,
)
from moa_bench.transcript import show_answer
from moa_bench.verifier import Verifier, open_verifier
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.options import DRAFTINGS, Drafting
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECT = "direct"
DEFAULT_PROFILES = "fios,cable,lte,4g"
TRACE = "trace"

T = TypeVar("T")

_SWITCH_S = 0.0005
_RESAMPLES = 4000
_PERCENTILES = (2.5, 97.5)
#: Modes that a user may choose from; ``auto`` should be as fast as the best of them.
_RIVALS = ("stream", "device", "server")
_FIGURES = {
    "answers": "answers",
    "ttft_ms": "first token ms",
    "mean": "ms/token",
    "p50": "p50",
    "p95": "p95",
    "longest_gap_ms": "longest gap ms",
    "tokens_per_round": "tokens/round",
    "passes_per_token": "passes/token",
    "bytes_up_per_token": "bytes up/token",
    "bytes_down_per_token": "bytes down/token",
    "identical": "identical",
}
_CUT_FIGURES = {
    "answers": "answers",
    "confirmed": "confirmed",
    "tentative": "written offline",
    "kept": "kept",
    "hello_ms": "ms to the Hello",
    "token_ms": "then to a token",
    "whole_ms": "to the whole answer",
    "identical": "identical",
}


class Network(Benchmark):
    """Latency, passes and bytes per token over emulated links; with ``--cut-after`` the recovery from a cut."""

    name = "network"
    purpose = "The cost of an answer over a network, for each way of serving the same target."
    summary = "latency, passes and bytes per token over emulated links; answers whose link is cut"
    description = f"""\
Measure the cost of an answer over a network, for each way of serving the same target on the same engine:

  stream    the server decodes alone and streams its tokens, as chat APIs do
  per-call  one request for each token; the server keeps its cache
  device    the device drafts with its bundle, the server verifies
  server    the server continues by itself within a credit, and drafts for itself if it has a drafter
  auto      the faster of device and server drafts, as the runtime finds out: a chat's default
  oracle    as device, with drafts that are always correct and take no time: the limit

Every question is asked over every link in all modes, whose order rotates. Only first turns are asked, each in a new
conversation on a new connection, through a new link, so that outages and recorded links begin again with each answer.
Connecting is not timed.

ttft_ms              from sending the question to the first token; mean over the answers
ms_per_token         k tokens that arrive t ms after those before them took t / k ms each; without first tokens
longest_gap_ms       the longest silence within an answer; mean over the answers
tokens_per_round     committed by one verdict; null when streaming
passes_per_token     forward passes of the target, prompts included, by tokens; all sessions of a verifier count,
                     so one of your own (--server) should have nothing else to do
bytes_up_per_token   payload of TCP over the link; over {DIRECT!r} the messages alone, without HTTP's and
bytes_down_per_token WebSocket's framing
identical            whether every answer is, token for token, the one that the target writes alone

Below the tables, auto's ms a token by that of stream, and by that of the fastest of stream, device and server, with
95 % intervals: bootstrap over the questions that all modes have answered. Each answer weighs the same.

With --cut-after N the link is cut after N confirmed tokens of each answer and restored --cut-seconds later. Nothing
passes meanwhile, and sockets hang, as in a tunnel. The device writes on with its bundle, and the verifier finishes the
answer. Modes: auto (the default), device, server.

confirmed            tokens of the target on screen when the link returned
written offline      tokens of the device after them
kept                 leading ones of these that the target would have written
ms to the Hello      from the link's return until the client greets on a new connection; none if the cut was too short
                     to be noticed, and the next two count from the link's return
then to a token      from the Hello to the next confirmed token
to the whole answer  from the Hello to the last token
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_link_options(parser)
        parser.add_argument(
            "--modes",
            metavar="NAMES",
            help=f"ways of serving to compare, with commas between them (default {','.join(MODES)}; auto with "
            "--cut-after)",
        )
        parser.add_argument(
            "--cut-after", type=int, metavar="N", help="cut the link after N confirmed tokens of each answer"
        )
        parser.add_argument(
            "--cut-seconds", type=float, default=20.0, metavar="S", help="duration of the cut (default %(default)g)"
        )
        options.add_question_options(parser, required=False)
        options.add_bundle_option(parser)
        options.add_target_options(parser)
        options.add_server_options(parser)
        options.add_draft_length_option(parser)
        options.add_answer_options(parser, max_new_tokens=32)
        parser.add_argument(
            "--threads", type=int, default=1, metavar="N", help="processor threads of the drafter (default %(default)s)"
        )
        parser.add_argument(
            "--answer-timeout",
            type=float,
            default=120.0,
            metavar="S",
            help="give up after an answer that takes longer, a cut not counted (default %(default)g)",
        )
        parser.add_argument("--show", action="store_true", help="print the answers, each token with its origin")
        options.add_timeline_option(parser)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        options.check_at_least(args, draft_length=1, max_new_tokens=1, threads=1, answer_timeout=1)
        settings = AnswerSettings(
            args.draft_length, args.max_new_tokens, options.sampling_of(args), args.threads, args.answer_timeout
        )
        cut = _cut_of(args)
        known = MODES if cut is None else DRAFTINGS
        default = ",".join(MODES) if cut is None else "auto"
        names = options.names_of("--modes", "mode", default if args.modes is None else args.modes, known)
        endpoint = options.endpoint_of(args)
        links = links_of(args, endpoint)
        if cut is not None and None in links.values():
            raise MoaError(f"--cut-after cuts an emulated link: leave {DIRECT} out of --profiles")
        questions, bundle = options.questions_of(args), options.bundle_of(args)
        tokenizer = ChatTokenizer.from_bundle(bundle)
        prompts, skipped = prompts_of(questions, tokenizer, bundle.manifest.max_context)
        results = Results(links, names, cutting=cut is not None)
        wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
        total = len(prompts) * len(links) * len(names)
        with (
            options.recording(args) as ends,
            open_verifier(endpoint, **wanted, options=ends.verifier_options) as verifier,
            Progress(total=total, desc="network", unit="answer") as progress,
        ):
            if cut is None:
                modes = make_modes(names, bundle, settings, ends.device)
                warm_up(prompts[0], verifier, modes, settings)
            measured = Measured(
                lambda: {**results.as_dict(), "skipped": [dataclasses.asdict(question) for question in skipped]},
                {
                    **options.question_settings(args),
                    "trace": [path.name for path in args.trace] if args.trace else None,
                    "round_trip_ms": args.round_trip_ms,
                    "target": bundle.manifest.target,
                    "dtype": args.dtype,
                    **dataclasses.asdict(settings),
                    "cut": None if cut is None else dataclasses.asdict(cut),
                    "own_verifier": endpoint is None,
                    "pinned": verifier.pinned,
                },
                bundle.manifest.fingerprints,
            )
            yield measured
            if cut is not None:
                for _ in measure_cuts(
                    prompts, verifier, links, cast("list[Drafting]", names), bundle, settings, cut, results
                ):
                    progress.update()
                    yield measured
                return
            for profile, mode, turn, outcome in measure_answers(prompts, verifier, links, modes, settings, results):
                progress.update()
                answer = outcome.answer
                ends.device.mark(f"answered over {profile}, {mode}", "answers", tokens=len(answer.tokens))
                if args.show:
                    show_answer(f"[{profile}, {mode}] {turn.text}", answer.tokens, answer.origins, tokenizer)
                yield measured

    def tables(self, result: Result) -> list[Table]:
        notes = "\n".join([_conditions(result), *skipped_notes(result)])
        if result["settings"]["cut"] is not None:
            return [_cut_table(result, notes)]
        last = next(reversed(result["profiles"]), None)
        loads = [
            Table(
                ["mode", *_FIGURES.values()],
                [[mode, *map({**figures, **figures["ms_per_token"]}.get, _FIGURES)] for mode, figures in modes.items()],
                title=profile,
                note=notes if profile == last else "",
            )
            for profile, modes in result["profiles"].items()
        ]
        paired = [
            [profile, *_interval(ratios.get("stream")), ratios["best"]["mode"], *_interval(ratios["best"])]
            for profile, ratios in result["auto"].items()
        ]
        header = ("profile", "stream", "95 %", "best", "its ratio", "95 %")
        return [*loads, Table(header, paired, title="auto, ms/token by those of")] if paired else loads

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw latency per token and time to the first token; with a cut the times after the link's return."""
        if result["settings"]["cut"] is not None:
            _plot_cuts(result, figure)
            return
        latency, first = figure.subplots(1, 2)
        profiles = result["profiles"]
        per_token = {p: {m: f["ms_per_token"] for m, f in modes.items()} for p, modes in profiles.items()}
        _bars(
            latency,
            {p: {m: f["mean"] for m, f in modes.items()} for p, modes in per_token.items()},
            {p: {m: f["p95"] for m, f in modes.items()} for p, modes in per_token.items()},
        )
        latency.set(title="time per token", ylabel="ms (bar: mean, whisker: up to the 95th percentile)")
        _bars(first, {p: {m: f["ttft_ms"] for m, f in modes.items()} for p, modes in profiles.items()})
        first.set(title="time to the first token", ylabel="ms (mean)")
        latency.legend()


def links_of(args: argparse.Namespace, endpoint: Endpoint | None) -> Mapping[str, LinkProfile | None]:
    """Return the links by name, None for no emulation.

    Raises:
        MoaError: see :func:`moa_bench.network.profiles_of`; or an emulator before a verifier with TLS.
    """
    profiles = {profile.name: profile for profile in profiles_of(args)}
    if profiles:
        check_without_tls(endpoint, f"measure it with --profiles {DIRECT}")
    return {name: profiles.get(name) for name in link_names(args)}


def _cut_of(args: argparse.Namespace) -> CutSettings | None:
    """Return when to cut links; None to cut none. Raises MoaError for numbers out of range."""
    if args.cut_after is None:
        return None
    options.check_at_least(args, cut_after=1, cut_seconds=1, max_new_tokens=args.cut_after + 1)
    if args.show or args.timeline:
        raise MoaError("--show and --timeline are for answers without a cut: leave them out, or --cut-after")
    return CutSettings(args.cut_after, args.cut_seconds)


# -- measuring -------------------------------------------------------------------------------------------


class Tally:
    """Sums over the answers of one mode over one link. Every figure per token is over all tokens of all answers, so
    long answers weigh more.

    *Latency*: see :func:`moa_bench.result.token_latencies`; an answer's first token has none, but the time to it.
    *Gap*: the longest silence between two messages of an answer. *Round*: a message of the device after the question,
    and its verdict; the first token belongs to no round.

    Attributes:
        seconds_a_token: of each answer; None if it has one token.
    """

    def __init__(self) -> None:
        self.answers = 0
        self.identical = True
        self._tokens = self._passes = self._bytes_up = self._bytes_down = 0
        self._rounds = self._tokens_of_rounds = 0
        self._first: list[float] = []
        self.seconds_a_token: list[float | None] = []
        self._latencies: list[float] = []
        self._gaps: list[float] = []

    def add(self, outcome: Outcome) -> None:
        answer = outcome.answer
        self.answers += 1
        self.identical &= outcome.identical
        self._tokens += len(answer.tokens)
        self._passes += outcome.passes
        self._bytes_up += outcome.bytes_up
        self._bytes_down += outcome.bytes_down
        self._first.append(answer.bursts[0].at - answer.sent)
        later = answer.bursts[1:]
        latencies = token_latencies(answer.bursts)
        self._latencies += latencies
        self.seconds_a_token.append(sum(latencies) / len(latencies) if latencies else None)
        if later:
            self._gaps.append(max(b.at - a.at for a, b in zip(answer.bursts, later, strict=False)))
        if outcome.in_rounds:
            self._rounds += len(later)
            self._tokens_of_rounds += sum(burst.tokens for burst in later)

    def as_dict(self) -> dict[str, Any]:
        """Return plain figures for JSON; null if there is nothing to tell."""
        return {
            "answers": self.answers,
            "tokens": self._tokens,
            "ttft_ms": mean_ms(self._first),
            "ms_per_token": {
                "mean": mean_ms(self._latencies),
                "p50": percentile_ms(self._latencies, 50),
                "p95": percentile_ms(self._latencies, 95),
            },
            "longest_gap_ms": mean_ms(self._gaps),
            "tokens_per_round": ratio(self._tokens_of_rounds, self._rounds),
            "passes_per_token": ratio(self._passes, self._tokens),
            "bytes_up_per_token": ratio(self._bytes_up, self._tokens, 1),
            "bytes_down_per_token": ratio(self._bytes_down, self._tokens, 1),
            "identical": self.identical if self.answers else None,
        }


class Results:
    """What was measured so far, by profile and mode: whole answers only.

    Attributes:
        tallies: of answers without a cut.
        cuts: answers with a cut.
        too_short: answers that ended before the cut or during it.
    """

    def __init__(self, profiles: Mapping[str, object], modes: Sequence[str], *, cutting: bool = False) -> None:
        self.tallies = {} if cutting else {profile: {mode: Tally() for mode in modes} for profile in profiles}
        self.cuts: dict[str, dict[str, list[CutAnswer]]] = (
            {profile: {mode: [] for mode in modes} for profile in profiles} if cutting else {}
        )
        self.too_short = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain figures for JSON: ``profiles`` by profile and mode, ``auto`` by profile if there is a pair, and
        ``cuts``."""
        paired = {
            profile: auto_ratios({mode: tally.seconds_a_token for mode, tally in modes.items()})
            for profile, modes in self.tallies.items()
        }
        return {
            "profiles": {
                profile: {mode: tally.as_dict() for mode, tally in modes.items()}
                for profile, modes in self.tallies.items()
            },
            "auto": {profile: ratios for profile, ratios in paired.items() if ratios is not None},
            "cuts": {
                profile: {mode: figures_of(answers) for mode, answers in modes.items()}
                for profile, modes in self.cuts.items()
            },
            "too_short": self.too_short,
        }


def auto_ratios(answers: Mapping[str, Sequence[float | None]]) -> dict[str, Any] | None:
    """Compare ``auto`` with ``stream``, and with the best of the modes that a user may choose from.

    Args:
        answers: by mode, seconds a token of each answer, in the order of questions; None for an answer of one token.
            An answer that some modes do not have yet is left out.

    Returns:
        ``stream`` and ``best``: ``ratio`` of the means (below 1: ``auto`` is faster), ``low`` and ``high``, the 95 %
        bootstrap interval over questions; ``best`` also has its ``mode``. None without ``auto`` or a rival, or with
        fewer than two answers.
    """
    rivals = [mode for mode in _RIVALS if mode in answers]
    if "auto" not in answers or not rivals:
        return None
    pairs = list(zip(*(answers[mode] for mode in ("auto", *rivals)), strict=False))
    seconds = np.array([pair for pair in pairs if None not in pair], dtype=np.float64)
    if len(seconds) < 2:
        return None
    means = seconds.mean(axis=0)
    best = 1 + int(means[1:].argmin())
    found: dict[str, Any] = {"best": {"mode": rivals[best - 1], **_ratio(seconds[:, 0], seconds[:, best])}}
    if "stream" in rivals:
        found["stream"] = _ratio(seconds[:, 0], seconds[:, 1 + rivals.index("stream")])
    return found


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    drawn = np.random.default_rng(0).integers(0, len(ours), (_RESAMPLES, len(ours)))
    low, high = np.percentile(ours[drawn].mean(axis=1) / theirs[drawn].mean(axis=1), _PERCENTILES)
    found = {"ratio": ours.mean() / theirs.mean(), "low": low, "high": high}
    return {name: round(float(each), 4) for name, each in found.items()}


def warm_up(prompt: Prompt, verifier: Verifier, modes: Mapping[str, Mode], settings: AnswerSettings) -> None:
    """Ask once in each mode without an emulator: first times are slow, and misfits show here.

    Raises:
        MoaError: bundle and verifier do not belong together, or the verifier refuses.
    """
    turn = _turn(prompt, verifier, settings)
    for mode in modes.values():
        ask(verifier, None, mode, turn, settings.answer_timeout_s)


def measure_answers(
    prompts: Sequence[Prompt],
    verifier: Verifier,
    profiles: Mapping[str, LinkProfile | None],
    modes: Mapping[str, Mode],
    settings: AnswerSettings,
    results: Results,
) -> Generator[tuple[str, str, Turn, Outcome], None, None]:
    """Count every answer into ``results`` and yield it with its profile, mode and question.

    The order of the modes rotates from question to question, so that none always profits from the work just before it,
    and slow changes of the machine's speed affect all alike.

    Raises:
        VerifierGoneError: the verifier died.
        MoaError: it refused, or an answer took too long.
    """
    with _quick_thread_switches():
        for number, prompt in enumerate(prompts):
            turn = _turn(prompt, verifier, settings)
            for profile, link in profiles.items():
                for mode in _rotated(list(modes), number):
                    outcome = ask(verifier, link, modes[mode], turn, settings.answer_timeout_s)
                    results.tallies[profile][mode].add(outcome)
                    yield profile, mode, turn, outcome


def measure_cuts(
    prompts: Sequence[Prompt],
    verifier: Verifier,
    profiles: Mapping[str, LinkProfile | None],
    modes: Sequence[Drafting],
    bundle: Bundle,
    settings: AnswerSettings,
    cut: CutSettings,
    results: Results,
) -> Generator[None, None, None]:
    """Cut the link of every answer; modes and errors as of :func:`measure_answers`."""
    for number, prompt in enumerate(prompts):
        turn = _turn(prompt, verifier, settings)
        for profile, link in profiles.items():
            for mode in _rotated(list(modes), number):
                assert link is not None
                answer = ask_and_cut(bundle, verifier, link, mode, turn, cut, settings)
                if answer is None:
                    results.too_short += 1
                else:
                    results.cuts[profile][mode].append(answer)
                yield


def _turn(prompt: Prompt, verifier: Verifier, settings: AnswerSettings) -> Turn:
    reference = verifier.decode(prompt.tokens, settings.max_new_tokens, settings.sampling)
    return Turn(prompt.text, prompt.tokens, reference)


def _rotated(names: list[T], by: int) -> list[T]:
    start = by % len(names)
    return names[start:] + names[:start]


@contextlib.contextmanager
def _quick_thread_switches() -> Iterator[None]:
    """Let the link's thread keep time beside the drafter's: Python's own 5 ms are a fast link's round trip."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# -- tables and plots ------------------------------------------------------------------------------------


def _interval(found: dict[str, Any] | None) -> list[object]:
    return [None, None] if found is None else [found["ratio"], f"{found['low']:.3f} - {found['high']:.3f}"]


def _cut_table(result: Result, notes: str) -> Table:
    cut = result["settings"]["cut"]
    several = any(len(modes) > 1 for modes in result["cuts"].values())
    rows = [
        [f"{profile}, {mode}" if several else profile, *map(figures.get, _CUT_FIGURES)]
        for profile, modes in result["cuts"].items()
        for mode, figures in modes.items()
    ]
    short = f"\nanswers that ended before the cut or during it: {result['too_short']}" if result["too_short"] else ""
    return Table(
        ["link", *_CUT_FIGURES.values()],
        rows,
        title=f"{cut['seconds']:g} s without the link, {cut['after']} tokens into answers; means",
        note=notes + short,
    )


def _plot_cuts(result: Result, figure: Figure) -> None:
    """Draw for each answer the milliseconds from the link's return to the Hello, and from there to its end."""
    axes = figure.subplots()
    every = [each for modes in result["cuts"].values() for figures in modes.values() for each in figures["every"]]
    hello = [1000 * (each["hello_s"] or 0) for each in every]
    whole = [1000 * each["whole_s"] for each in every]
    axes.barh(range(len(hello)), hello, label="to the Hello")
    axes.barh(range(len(whole)), whole, left=hello, label="to the whole answer")
    axes.set(xlabel="ms from the link's return", ylabel="answer", yticks=range(len(whole)))
    if whole:
        axes.legend()


_ByMode = dict[str, dict[str, float | None]]  # figures by profile and mode


def _bars(axes: Axes, heights: _ByMode, tops: _ByMode | None = None) -> None:
    """Draw a group of bars for each profile, with whiskers from ``heights`` up to ``tops``."""
    modes = list(next(iter(heights.values())))
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        at = [group + (number - (len(modes) - 1) / 2) * width for group in range(len(heights))]
        bars = [_or_nan(heights[profile][mode]) for profile in heights]
        whiskers = None
        if tops is not None:
            up = [max(0.0, _or_nan(tops[profile][mode]) - bar) for profile, bar in zip(heights, bars, strict=True)]
            whiskers = [[0.0] * len(bars), up]
        axes.bar(at, bars, width, yerr=whiskers, capsize=2, label=mode)
    axes.set_xticks(range(len(heights)), list(heights))


def _or_nan(figure: float | None) -> float:
    return nan if figure is None else figure


def _conditions(result: Result) -> str:
    settings = result["settings"]
    return (
        f"draft length {settings['draft_length']}, {sampling_note(settings['sampling'])}, "
        f"answers of at most {settings['max_new_tokens']} tokens, {result['seconds']:.0f} s"
    )


# -- links -----------------------------------------------------------------------------------------------


def add_link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profiles",
        metavar="NAMES",
        help=f"links to emulate, separated by commas: {', '.join(PROFILES)}, or {DIRECT} for no emulation "
        f"(default {DEFAULT_PROFILES}; none with --trace)",
    )
    parser.add_argument(
        "--trace",
        nargs=2,
        type=Path,
        metavar=("UP", "DOWN"),
        help="also emulate a recorded link: two trace files of Mahimahi, towards the verifier and towards the client; "
        "each line is the time in ms at which one packet of 1500 bytes passes",
    )
    parser.add_argument(
        "--round-trip-ms",
        type=float,
        metavar="MS",
        help="delay added to each round trip of the recorded link, which the trace files leave out (default 0)",
    )


def link_names(args: argparse.Namespace) -> list[str]:
    """What was asked for, in order and each once: names of profiles, perhaps ``direct``, perhaps ``trace``."""
    if args.profiles is None and args.trace:
        return [TRACE]
    listed = DEFAULT_PROFILES if args.profiles is None else args.profiles
    names = [name.strip() for name in listed.split(",")]
    return list(dict.fromkeys([*names, *([TRACE] if args.trace else [])]))


def profiles_of(args: argparse.Namespace) -> list[LinkProfile]:
    """The links to emulate, in the order in which they were named, the recorded one last; ``direct`` is left out.

    Raises:
        MoaError: no such profile, a trace that cannot be read, or a round trip that no link can have.
    """
    round_trip_ms = 0.0 if args.round_trip_ms is None else args.round_trip_ms
    if args.round_trip_ms is not None and not args.trace:
        raise MoaError("--round-trip-ms belongs to --trace: the named profiles have round trips of their own")
    if not 0 <= round_trip_ms < inf:
        raise MoaError(f"--round-trip-ms must be 0 or more, not {round_trip_ms:g}")
    recorded = [_recorded(*args.trace, round_trip_ms)] if args.trace else []
    taken = {DIRECT, *(profile.name for profile in recorded)}
    return [*(get_profile(name) for name in link_names(args) if name not in taken), *recorded]


def check_without_tls(endpoint: Endpoint | None, instead: str) -> None:
    """Raises MoaError: no emulated link can lead to this verifier; ``instead`` says what to do."""
    if endpoint is not None and endpoint.address.startswith("wss:"):
        raise MoaError(
            f"{endpoint.address} speaks TLS, and its certificate is not for the address of an emulated link: {instead}"
        )


def _recorded(up: Path, down: Path, round_trip_ms: float) -> LinkProfile:
    return LinkProfile(TRACE, None, None, round_trip_ms, up_trace=read_trace(up), down_trace=read_trace(down))
