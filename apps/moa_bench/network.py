"""``moa-bench network``: the cost of an answer over a network, for each way of serving the same target."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, sampling_note, skipped_notes
from moa_bench.link.profiles import PROFILES, LinkProfile, get_profile
from moa_bench.link.wire import read_trace
from moa_bench.peer import LLAMACPP, PEERS, PEERS_ON_ALL, open_llamacpp
from moa_bench.questions import Prompt, prompts_of
from moa_bench.result import latency_ms, mean_ms, ratio, token_latencies
from moa_bench.serving import (
    MODES,
    AnswerSettings,
    CutAnswer,
    CutSettings,
    Outcome,
    Turn,
    ask,
    ask_and_cut,
    cut_figures,
    make_modes,
)
from moa_bench.transcript import show_answer
from moa_bench.verifier import Verifier, open_verifier
from moa_runtime.errors import MoaError
from moa_runtime.options import DRAFTINGS
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECT = "direct"
DEFAULT_PROFILES = "fios,cable,lte,4g"
TRACE = "trace"

_SWITCH_S = 0.0005
_RESAMPLES = 4000
_PERCENTILES = (2.5, 97.5)
#: What is compared: a mode, with the fastest of others. Of the first three a user may choose, and ``auto`` should be as
#: fast as the best.
_COMPARED = (
    ("auto", ("stream",)),
    ("auto", ("stream", "device", "server")),
    ("stream", PEERS[:1]),
    ("auto", PEERS),
    ("auto", PEERS_ON_ALL),
)
#: Columns of the tables: names of figures, and headers.
_FIGURES = ("answers", "ttft_ms", "mean", "p50", "p95", "longest_gap_ms", "tokens_per_round", "passes_per_token")
_FIGURES += ("bytes_up_per_token", "bytes_down_per_token", "identical", "agreed")
_HEADER = ("answers", "first token ms", "ms/token", "p50", "p95", "longest gap ms", "tokens/round", "passes/token")
_HEADER += ("bytes up/token", "bytes down/token", "identical", "agreed")
_RATIOS = ("best", "ratio", "low", "high", "first_token")
_RATIOS_HEADER = ("fastest", "ratio", "95 % from", "to", "first token")
_CUT_FIGURES = ("answers", "confirmed", "tentative", "kept", "hello_ms", "token_ms", "whole_ms", "identical")
_CUT_HEADER = ("answers", "confirmed", "written offline", "kept", "ms to the Hello", "then to a token")
_CUT_HEADER += ("to the whole answer", "identical")


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

llama.cpp is the peer: it streams as the verifier does, from a process of its own, the same target's GGUF file. The word
{LLAMACPP} stands for all of these:

  llamacpp-same    with as many threads as the verifier
  llamacpp-q4_0    the file in Q4_0, rounded again by llama.cpp: less exact, and its quickest format
  llamacpp-lookup  the file, with drafts from n-grams of the text
  ...-all          the same three with the processors of verifier and device together

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
agreed               share of the tokens that come before the first other one in each answer; another engine rounds
                     otherwise, and draws otherwise when it samples

Below the tables, ms a token of auto and stream divided by those of the fastest of their rivals (below 1: auto or stream
is faster), with 95 % intervals: bootstrap over the questions that these modes have answered. Each answer weighs the
same. Beside it the time to the first token by that rival's.

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
        add = options.adder(parser)
        add_link_options(parser)
        add(
            "--modes NAMES",
            "ways of serving to compare, with commas between them "
            f"(default {','.join(MODES)}; auto with --cut-after; {LLAMACPP}: all modes of llama.cpp)",
        )
        add("--cut-after N", "cut the link after N confirmed tokens of each answer")
        add("--cut-seconds S", "duration of the cut (default %(default)g)", default=20.0)
        options.add_question_options(parser, required=False)
        options.add_bundle_options(parser)
        options.add_target_options(parser)
        options.add_server_options(parser)
        options.add_answer_options(parser, max_new_tokens=32)
        add("--threads N", "processor threads of the drafter (default %(default)s)", default=1)
        add(
            "--answer-timeout S",
            "give up after an answer that takes longer, a cut not counted (default %(default)g)",
            default=120.0,
        )
        add("--show", "print the answers, each token with its origin", action="store_true")
        options.add_timeline_option(parser)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        options.check_at_least(args, draft_length=1, max_new_tokens=1, threads=1, answer_timeout=1)
        settings = AnswerSettings(
            args.draft_length, args.max_new_tokens, options.sampling_of(args), args.threads, args.answer_timeout
        )
        cut = _cut_of(args)
        known = (*MODES, LLAMACPP, *PEERS, *PEERS_ON_ALL) if cut is None else DRAFTINGS
        default = ",".join(MODES) if cut is None else "auto"
        chosen = options.names_of("--modes", "mode", default if args.modes is None else args.modes, known)
        every = [each for name in chosen for each in ((*PEERS, *PEERS_ON_ALL) if name == LLAMACPP else (name,))]
        names = list(dict.fromkeys(every))
        endpoint = options.endpoint_of(args)
        peer_names = [name for name in names if name not in known[: len(MODES)]]
        if endpoint is not None and peer_names:
            text = f"{LLAMACPP} runs beside a verifier that is started here: leave out --server"
            raise MoaError(text, code="contradiction")
        links = links_of(args, endpoint)
        if cut is not None and None in links.values():
            message = f"--cut-after cuts an emulated link: leave {DIRECT} out of --profiles"
            raise MoaError(message, code="contradiction")
        questions, bundle = options.questions_of(args), options.bundle_of(args)
        tokenizer = ChatTokenizer.from_bundle(bundle)
        prompts, skipped = prompts_of(questions, tokenizer, bundle.manifest.max_context)
        results = Results(links, names, cutting=cut is not None)
        wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
        total = len(prompts) * len(links) * len(names)
        context = max(len(prompt.tokens) for prompt in prompts) + args.max_new_tokens
        with (
            options.recording(args) as (timeline, recorded),
            open_llamacpp(peer_names, args.model, context=context, stop_tokens=bundle.manifest.stop_tokens) as peers,
            open_verifier(endpoint, **wanted, options=recorded) as verifier,
            Progress(total=total, desc="network", unit="answer") as progress,
        ):
            if cut is None:
                modes = make_modes(names, bundle, settings, timeline)
                ask_one = partial(ask, {name: peers.get(name, verifier) for name in names}, modes, settings)
                turn = _turn(prompts[0], verifier, settings)
                for mode in modes:  # first times are slow, and misfits of bundle and verifier show here
                    ask_one(None, mode, turn)
            else:
                ask_one = partial(ask_and_cut, verifier, bundle, settings, cut)
            measured = Measured(
                lambda: {**results.as_dict(), "skipped": skipped},
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
            for profile, mode, turn, outcome in measure_answers(prompts, verifier, links, ask_one, settings, results):
                progress.update()
                if isinstance(outcome, Outcome):
                    answer = outcome.answer
                    timeline.mark(f"answered over {profile}, {mode}", "answers", tokens=len(answer.tokens))
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
                ["mode", *_HEADER],
                [[mode, *map({**figures, **figures["ms_per_token"]}.get, _FIGURES)] for mode, figures in modes.items()],
                title=profile,
                note=notes if profile == last else "",
            )
            for profile, modes in result["profiles"].items()
        ]
        rows = [
            [profile, each["mode"], ", ".join(each["rivals"]), *map(each.get, _RATIOS)]
            for profile, found in result["compared"].items()
            for each in found
        ]
        title = "ms a token, and to the first token, divided by those of the fastest rival: below 1 is faster"
        if any("q4_0" in mode for modes in result["profiles"].values() for mode in modes):
            title += " (q4_0: the file, rounded again by llama.cpp)"
        return [*loads, Table(["profile", "mode", "rivals", *_RATIOS_HEADER], rows, title=title)] if rows else loads

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw latency per token and time to the first token; with a cut the times after the link's return."""
        if result["settings"]["cut"] is not None:
            _plot_cuts(result, figure)
            return
        latency, first = figure.subplots(1, 2)
        _bars(latency, result["profiles"], lambda load: (load["ms_per_token"]["mean"], load["ms_per_token"]["p95"]))
        latency.set(title="time per token", ylabel="ms (bar: mean, whisker: up to the 95th percentile)")
        _bars(first, result["profiles"], lambda load: (load["ttft_ms"], load["ttft_ms"]))
        first.set(title="time to the first token", ylabel="ms (mean)")
        latency.legend()


def _cut_of(args: argparse.Namespace) -> CutSettings | None:
    """Return when to cut links; None to cut none. Raises MoaError for numbers out of range."""
    if args.cut_after is None:
        return None
    options.check_at_least(args, cut_after=1, cut_seconds=1, max_new_tokens=args.cut_after + 1)
    if args.show or args.timeline:
        message = "--show and --timeline are for answers without a cut: leave them out, or --cut-after"
        raise MoaError(message, code="contradiction")
    return CutSettings(args.cut_after, args.cut_seconds)


# -- measuring -------------------------------------------------------------------------------------------


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Sum up the answers of one mode over one link, for JSON; figures without data are None.

    Every figure per token is over all tokens of all answers, so long answers weigh more. *Latency*: see
    :func:`moa_bench.result.token_latencies`. *Gap*: the longest silence between two messages of an answer. *Round*: a
    message of the device after the question, and its verdict; an answer's first token belongs to none.
    """
    answers = [outcome.answer for outcome in outcomes]
    tokens = sum(len(answer.tokens) for answer in answers)
    rounds = [burst for outcome in outcomes if outcome.in_rounds for burst in outcome.answer.bursts[1:]]
    gaps = [max(b.at - a.at for a, b in pairwise(answer.bursts)) for answer in answers if len(answer.bursts) > 1]
    return {
        "answers": len(answers),
        "tokens": tokens,
        "ttft_ms": mean_ms([answer.first_s for answer in answers]),
        "ms_per_token": latency_ms([each for answer in answers for each in token_latencies(answer.bursts)]),
        "longest_gap_ms": mean_ms(gaps),
        "tokens_per_round": ratio(sum(burst.tokens for burst in rounds), len(rounds)),
        "passes_per_token": ratio(sum(outcome.passes for outcome in outcomes), tokens),
        "bytes_up_per_token": ratio(sum(outcome.bytes_up for outcome in outcomes), tokens, 1),
        "bytes_down_per_token": ratio(sum(outcome.bytes_down for outcome in outcomes), tokens, 1),
        "identical": all(outcome.identical for outcome in outcomes) if outcomes else None,
        "agreed": ratio(sum(outcome.agreed for outcome in outcomes), tokens),
    }


class Results:
    """Whole answers so far, by profile and mode. ``too_short``: number of answers that ended before the cut or during
    it."""

    def __init__(self, profiles: Iterable[str], modes: Sequence[str], *, cutting: bool = False) -> None:
        self.modes, self.too_short, self._cutting = list(modes), 0, cutting
        self._answers: dict[str, dict[str, list[Any]]] = {profile: {mode: [] for mode in modes} for profile in profiles}

    def add(self, profile: str, mode: str, outcome: Outcome | CutAnswer | None) -> None:
        """Count one answer; None is one that was too short."""
        if outcome is None:
            self.too_short += 1
        else:
            self._answers[profile][mode].append(outcome)

    def as_dict(self) -> dict[str, Any]:
        """Return plain figures for JSON: ``profiles`` or ``cuts`` by profile and mode, ``compared`` by profile."""
        figures, found = cut_figures if self._cutting else figures_of, {}
        for profile, modes in self._answers.items():
            found[profile] = {mode: figures(answers) for mode, answers in modes.items()}
        if self._cutting:
            return {"profiles": {}, "compared": {}, "cuts": found, "too_short": self.too_short}
        compared = {}
        for profile, modes in self._answers.items():
            times = {mode: [(a.answer.seconds_a_token, a.answer.first_s) for a in each] for mode, each in modes.items()}
            compared |= {profile: pairs} if (pairs := compare(times)) else {}
        return {"profiles": found, "compared": compared, "cuts": {}, "too_short": self.too_short}


def compare(answers: Mapping[str, Sequence[tuple[float | None, float]]]) -> list[dict[str, Any]]:
    """Compare modes with the fastest of their rivals, see ``_COMPARED``.

    Args:
        answers: by mode, seconds a token of each answer, and to its first, in the order of questions; None for an
            answer of one token. An answer that some of the modes do not have yet is left out.

    Returns:
        for each pair with at least two answers ``mode``, ``rivals``, the ``best`` of them, ``ratio`` of the means
        (below 1: ``mode`` is faster), ``low`` and ``high``, its 95 % bootstrap interval over questions, and
        ``first_token``, the ratio of the mean times to the first token.
    """
    found: list[dict[str, Any]] = []
    for mode, every in _COMPARED:
        rivals = [rival for rival in every if rival in answers]
        if mode not in answers or not rivals or (found and found[-1]["rivals"] == rivals):
            continue
        pairs = list(zip(*(answers[each] for each in (mode, *rivals)), strict=False))
        # [answers, modes, 2]
        times = np.array([pair for pair in pairs if None not in (a for a, _ in pair)], dtype=np.float64)
        if len(times) < 2:
            continue
        seconds, firsts = times[..., 0], times[..., 1].mean(axis=0)
        best = 1 + int(seconds.mean(axis=0)[1:].argmin())
        figures = {**_ratio(seconds[:, 0], seconds[:, best]), "first_token": round(float(firsts[0] / firsts[best]), 4)}
        found.append({"mode": mode, "rivals": rivals, "best": rivals[best - 1], **figures})
    return found


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    drawn = np.random.default_rng(0).integers(0, len(ours), (_RESAMPLES, len(ours)))
    low, high = np.percentile(ours[drawn].mean(axis=1) / theirs[drawn].mean(axis=1), _PERCENTILES)
    found = {"ratio": ours.mean() / theirs.mean(), "low": low, "high": high}
    return {name: round(float(each), 4) for name, each in found.items()}


def measure_answers(
    prompts: Sequence[Prompt],
    verifier: Verifier,
    links: Mapping[str, LinkProfile | None],
    ask_one: Callable[[LinkProfile | None, str, Turn], Outcome | CutAnswer | None],
    settings: AnswerSettings,
    results: Results,
) -> Generator[tuple[str, str, Turn, Outcome | CutAnswer | None], None, None]:
    """Count every answer into ``results`` and yield it with its profile, mode and question.

    The order of the modes rotates from question to question, so that none always profits from the work just before it,
    and slow changes of the machine's speed affect all alike. Raises as :func:`moa_bench.serving.watched`.
    """
    # The link's thread keeps time beside the drafter's: Python's own 5 ms are a fast link's round trip.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        for number, prompt in enumerate(prompts):
            turn, start = _turn(prompt, verifier, settings), number % len(results.modes)
            for profile, link in links.items():
                for mode in (*results.modes[start:], *results.modes[:start]):
                    outcome = ask_one(link, mode, turn)
                    results.add(profile, mode, outcome)
                    yield profile, mode, turn, outcome
    finally:
        sys.setswitchinterval(before)


def _turn(prompt: Prompt, verifier: Verifier, settings: AnswerSettings) -> Turn:
    reference = verifier.decode(prompt.tokens, settings.max_new_tokens, settings.sampling)
    return Turn(prompt.text, prompt.tokens, reference)


# -- tables and plots ------------------------------------------------------------------------------------


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
        ["link", *_CUT_HEADER],
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


def _bars(axes: Axes, profiles: Result, heights: Callable[[Result], tuple[float | None, float | None]]) -> None:
    """Draw a group of bars for each profile, one a mode, with whiskers from its first height up to its second."""
    modes = list(next(iter(profiles.values())))
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        at = [group + (number - (len(modes) - 1) / 2) * width for group in range(len(profiles))]
        # As floats: None is NaN.
        bars, tops = np.array([heights(profile[mode]) for profile in profiles.values()], np.float64).T
        whiskers = [np.zeros_like(bars), np.fmax(0.0, tops - bars)] if (tops != bars).any() else None
        axes.bar(at, bars, width, yerr=whiskers, capsize=2, label=mode)
    axes.set_xticks(range(len(profiles)), list(profiles))


def _conditions(result: Result) -> str:
    settings = result["settings"]
    return (
        f"draft length {settings['draft_length']}, {sampling_note(settings['sampling'])}, "
        f"answers of at most {settings['max_new_tokens']} tokens, {result['seconds']:.0f} s"
    )


# -- links -----------------------------------------------------------------------------------------------


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the links to emulate."""
    add = options.adder(parser)
    add(
        "--profiles NAMES",
        f"links to emulate, separated by commas: {', '.join(PROFILES)}, or {DIRECT} for no emulation "
        f"(default {DEFAULT_PROFILES}; none with --trace)",
    )
    add(
        "--trace",
        "also emulate a recorded link: two trace files of Mahimahi, towards the verifier and towards the client; "
        "each line is the time in ms at which one packet of 1500 bytes passes",
        nargs=2,
        type=Path,
        metavar=("UP", "DOWN"),
    )
    add(
        "--round-trip-ms MS",
        "delay added to each round trip of the recorded link, which the trace files leave out (default 0)",
    )


def links_of(args: argparse.Namespace, endpoint: Endpoint | None) -> dict[str, LinkProfile | None]:
    """Return the links by name, in the order in which they were named, a recorded one last; None for no emulation.
    Raises MoaError: an unknown profile, a trace that cannot be read, an impossible round trip, or an emulated link
    to a verifier with TLS."""
    round_trip_ms = args.round_trip_ms or 0.0
    if args.round_trip_ms is not None and not args.trace:
        message = "--round-trip-ms belongs to --trace: the named profiles have round trips of their own"
        raise MoaError(message, code="contradiction")
    if not 0 <= round_trip_ms < inf:
        raise MoaError(f"--round-trip-ms must be 0 or more, not {round_trip_ms:g}", code="out_of_range")
    profiles = args.profiles
    if profiles is None:
        profiles = TRACE if args.trace else DEFAULT_PROFILES
    without = (DIRECT, TRACE) if args.trace else (DIRECT,)
    names = [name.strip() for name in profiles.split(",")]
    links = {name: None if name in without else get_profile(name) for name in names}
    if args.trace:
        up, down = map(read_trace, args.trace)
        links[TRACE] = LinkProfile(TRACE, None, None, round_trip_ms, up_trace=up, down_trace=down)
    if any(links.values()) and endpoint is not None and endpoint.address.startswith("wss:"):
        message = (
            f"{endpoint.address} speaks TLS, and its certificate is not for the address of an emulated link: "
            f"measure it with --profiles {DIRECT}"
        )
        raise MoaError(message, code="tls")
    return links
