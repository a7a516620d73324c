"""``moa-bench offline``: what the device writes without the link, and how much of it the target keeps."""

from __future__ import annotations

import argparse
import copy
import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, skipped_notes
from moa_bench.harness import (
    Answer,
    Conversation,
    Device,
    LoopbackVerifier,
    RefusedError,
    device_of,
    draft_once,
    engine_of,
    exchange,
)
from moa_bench.questions import Question
from moa_bench.result import ratio, rounded
from moa_bench.simulated_clock import Clock
from moa_bench.transcript import MARKS, ROLLED_BACK, show_answer, show_tokens
from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.drafters.ngram import NgramDrafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.options import LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Origin, Sampling, SessionEvent
from moa_runtime.session.handshake import Limits
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import common_length
from moa_server.engine.base import Engine
from moa_server.engine.baseline import decode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITERS = ("writer", "moa", "moa-unbounded", "ngram", "nothing")

#: The target's log-probabilities (nats, float32 ``[n]``) of n tokens that follow a prefix: ``score(prefix, tokens)``.
Score = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]

#: Length of the n-grams that measure repetition.
NGRAM = 4
_GREEDY = Sampling()
#: Tokens of each draft before the cut; the committed text does not depend on it.
_DRAFT_LENGTH = 6


class Offline(Benchmark):
    """Text written without the link, and the part of it that survives."""

    name = "offline"
    purpose = "What the device writes when the network dies, and how much of it the target keeps."
    summary = "what is written without the link, and how much of it is kept"
    description = """\
Measure what a device writes while the link is away, and how much of it is left when the link is back.

The first turn of every question is asked, and the link is cut in the middle of the answer. Then several writers
continue from the same point: "writer", the bundle's whole model, if it has one; "moa", its drafter, which stops
when it is no longer sure; "moa-unbounded", the same drafter without its stopping rule; "ngram", which copies the
text that followed the last one to five tokens earlier in the conversation; and "nothing", a device that waits.
Afterwards each reconnects, and the target verifies the text in one pass: it is rolled back from the first
token that the target would not have written.
Everything is greedy, so the text before the cut does not depend on the drafter, and results from before and after
a training can be compared.

For each writer and length:
  written            tokens on screen during the outage; fewer than the length if the writer ends the turn or stops
  agreement          leading tokens equal to the target's own continuation
  kept, share_kept   tokens that survive the reconnection, also as a share of all written
  perplexity         of the text under the target: exp of the mean negative log-probability of a token
  target_perplexity  the same of the target's own continuation, of as many tokens as were written
  perplexity_ratio   the first divided by the second
  distinct           share of 4-grams that are new in their text; target_distinct the same of the target's own

Read the ratio together with "distinct": a text that repeats itself is easy to predict, so its ratio falls with
the length, even below 1.

Device and verifier run in this one process and talk over the real protocol, without sockets or waiting. Going
offline is no special case there: the session is told that the connection is gone, and its tentative text grows.
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        defaults = OfflineSettings()
        options.add_question_options(parser)
        options.add_bundle_options(parser, backend=True)
        options.add_target_options(parser)
        add(
            "--after N",
            "committed tokens of the answer before the cut; a question with a shorter answer is skipped, "
            "and listed (default %(default)s)",
            default=defaults.after,
        )
        add(
            "--lengths N,N,...",
            "tokens to write during the cut (default %(default)s)",
            default=",".join(map(str, defaults.lengths)),
        )
        add(
            "--show",
            "print, for every question, the text before the cut, the text of each writer with its kept part and "
            "the part rolled back, and the target's own",
            action="store_true",
        )
        options.add_ngrams_option(parser)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        options.check_at_least(args, after=1)
        lengths = options.numbers_of("--lengths", args.lengths, 1, Limits().max_draft_tokens)
        settings = OfflineSettings(args.after, lengths)
        questions, bundle = options.questions_of(args), options.bundle_of(args)
        with Progress(questions, desc="offline", unit="question") as asked:  # visible while everything is loaded, too
            device = device_of(bundle, args.backend, ngrams=args.ngrams)
            engine = engine_of(args)
            from moa_server.engine.baseline import log_probabilities  # imported late: it brings torch

            results = Results(settings.lengths, WRITERS if device.new_writer else WRITERS[1:])
            measured = Measured(
                results.as_dict,
                {
                    **options.question_settings(args),
                    "target": bundle.manifest.target,
                    "ngrams": args.ngrams,
                    "after": settings.after,
                    "lengths": list(settings.lengths),
                },
                bundle.manifest.fingerprints,
            )
            yield measured
            asked.unpause()  # the estimate leaves out the loading
            score = functools.partial(log_probabilities, engine)
            for question in asked:
                outcome = try_question(question, device, engine, score, settings)
                if isinstance(outcome, str):
                    results.skipped.append({"question_id": question.id, "reason": outcome})
                else:
                    results.trials.append(outcome)
                    if args.show:
                        show_trial(outcome, device.tokenizer)
                yield measured

    def tables(self, result: Result) -> list[Table]:
        settings = result["settings"]
        conditions = (
            f"questions: {result['questions']}, greedy, the link cut after {settings['after']} tokens of the answer, "
            f"{result['seconds']:.0f} s"
        )
        return [
            Table(
                ["written offline by", "length", "on screen", "agree", "survive", "share kept"],
                _rows(result, "written", "agreement", "kept", "share_kept"),
                title="Tokens per outage: on screen meanwhile, agreeing with the target's own, surviving the "
                "reconnection",
            ),
            Table(
                ["written offline by", "length", "perplexity", "target's", "ratio", "distinct", "target's"],
                _rows(result, "perplexity", "target_perplexity", "perplexity_ratio", "distinct", "target_distinct"),
                title="The text under the target, beside the target's own of the same length (distinct: share of "
                "4-grams)",
                note="\n".join([conditions, *skipped_notes(result)]),
            ),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw agreement, perplexity ratio and repetition against the length written."""
        lengths = result["settings"]["lengths"]
        panels = {
            "agreement": "leading tokens that agree",
            "perplexity_ratio": "perplexity, ratio to the target's",
            "distinct": "share of distinct 4-grams",
        }
        for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for writer, figures in result["writers"].items():
                values = [figures[str(length)][name] for length in lengths]  # matplotlib leaves out None
                axes.plot(lengths, values, marker="o", label=writer)
            axes.set_title(title, fontsize="medium")
            axes.set(xlabel="tokens written offline", xscale="log", xticks=lengths, xticklabels=lengths, ylim=(0, None))
            axes.minorticks_off()
            axes.legend()


class OfflineSettings(NamedTuple):
    """Committed tokens of the answer before the link is cut, and the most tokens to write during the cut."""

    after: int = 32
    lengths: tuple[int, ...] = (16, 32, 64, 128)


# -- figures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Tokens, and the target's log-probability of each (nats, float32 ``[n]``)."""

    tokens: list[int]
    log_probabilities: NDArray[np.float32]

    def first(self, count: int) -> Text:
        """Return the first ``count`` tokens, fewer of a shorter text."""
        return Text(self.tokens[:count], self.log_probabilities[:count])


def perplexity_of(texts: Sequence[Text]) -> float | None:
    """Return exp of the mean negative log-probability of a token; None without tokens."""
    tokens = sum(len(text.tokens) for text in texts)
    nats = sum(float(text.log_probabilities.sum(dtype=np.float64)) for text in texts)
    return math.exp(-nats / tokens) if tokens else None


def distinct_of(texts: Sequence[Text]) -> float | None:
    """Return the share of 4-grams that are new in their text; None if no text is that long."""
    grams = [[tuple(text.tokens[at : at + NGRAM]) for at in range(len(text.tokens) - NGRAM + 1)] for text in texts]
    return ratio(sum(len(set(own)) for own in grams), sum(map(len, grams)))


class Written(NamedTuple):
    """One writer's text during a cut, and the number of its tokens that the target kept afterwards."""

    text: Text
    kept: int


@dataclass(frozen=True)
class Trial:
    """One question: the answer up to the cut, the target's continuation, and each writer's text."""

    question: str
    answer: Answer
    target: Text
    written: dict[str, Written]


def figures_of(outages: Sequence[tuple[Written, Text]], length: int) -> dict[str, Any]:
    """Return the figures of one writer at one length, for JSON; None if nothing was written.

    A writer that stops earlier writes the first tokens of the same text, and the target keeps the same leading tokens
    of them. Of the target's own text, as many tokens count as were written.

    Example: at length 3 one text of 3 tokens begins with 2 of the target's, and the target keeps these 2; another has 1
    token, a wrong one. Then 2 tokens are written on average, the agreement is 1 token, and the share kept is 2 of 4.
    ``outages``: the writer's texts, each with the target's own continuation.
    """
    texts = [written.text.first(length) for written, _ in outages]
    own = [target.first(len(text.tokens)) for text, (_, target) in zip(texts, outages, strict=True)]
    tokens, kept = sum(len(text.tokens) for text in texts), sum(min(written.kept, length) for written, _ in outages)
    agreed = sum(common_length(text.tokens, target.tokens) for text, target in zip(texts, own, strict=True))
    perplexity, target_perplexity = perplexity_of(texts), perplexity_of(own)
    return {
        "written": ratio(tokens, len(outages)),
        "agreement": ratio(agreed, len(outages)),
        "kept": ratio(kept, len(outages)),
        "share_kept": ratio(kept, tokens),
        "perplexity": rounded(perplexity),
        "target_perplexity": rounded(target_perplexity),
        "perplexity_ratio": ratio(perplexity, target_perplexity) if perplexity and target_perplexity else None,
        "distinct": distinct_of(texts),
        "target_distinct": distinct_of(own),
    }


@dataclass
class Results:
    """Whole questions so far. ``writers``: those of :data:`WRITERS` that there are."""

    lengths: Sequence[int]
    writers: Sequence[str] = WRITERS
    trials: list[Trial] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain figures for JSON."""
        writers = {}
        for writer in self.writers:
            outages = [(trial.written[writer], trial.target) for trial in self.trials]
            writers[writer] = {str(length): figures_of(outages, length) for length in self.lengths}
        return {"questions": len(self.trials), "writers": writers, "skipped": self.skipped}


# -- measuring -------------------------------------------------------------------------------------------


class Outage:
    """A conversation at the moment its link was cut, from which any number of texts can be tried.

    Each is tried on a copy of the session. To the verifier, the next copy that reconnects is a client without the last
    verdict: the verifier repeats its decisions since the cut and continues after them.

    Args:
        session: disconnected, while an answer runs and nothing is tentative.
        verifier: the other end of its conversation.
    """

    def __init__(self, session: ClientSession, verifier: LoopbackVerifier) -> None:
        self._session, self._verifier = session, verifier

    @property
    def committed(self) -> list[int]:
        """The conversation up to the cut."""
        return list(self._session.committed)

    def write(self, writer: Drafter, most: int) -> list[int]:
        """Let ``writer`` write alone: ``most`` tokens, fewer if it ends the turn or stops."""
        session, clock = copy.deepcopy(self._session), Clock()
        loop = DraftingLoop(session, writer, FixedShape(), LoopSettings(offline_limit=most, drafting="device"))
        while draft_once(loop, clock):
            pass
        return list(session.tentative)

    def reconnect(self, text: Sequence[int]) -> int:
        """Return how many tokens of ``text``, written since the cut, the target keeps when the link is back. ``text``:
        at most as long as one draft may be."""
        session = copy.deepcopy(self._session)
        session.extend(text, Origin.OFFLINE)
        loop, heard = DraftingLoop(session, None, FixedShape(), LoopSettings(drafting="device")), list[SessionEvent]()
        loop.listen(heard.append)  # type: ignore[arg-type]
        loop.opened()
        exchange(loop, self._verifier)  # the handshake
        while session.tentative:
            loop.next(0.0)
            exchange(loop, self._verifier)
        return sum(
            origin is Origin.OFFLINE for event in heard if isinstance(event, Committed) for origin in event.origins
        )


def try_question(
    question: Question, device: Device, engine: Engine, score: Score, settings: OfflineSettings
) -> Trial | str:
    """Ask the first turn of a question, cut the link, and try every writer; returns the reason if that cannot be done.
    Raises RefusedError: bundle and engine do not belong together."""
    longest, drafter = max(settings.lengths), device.new_drafter()
    with closing(LoopbackVerifier(engine)) as verifier:
        shape = _UpTo(settings.after)
        conversation = Conversation(verifier, drafter, device.fingerprints, device.stop_tokens, shape)
        try:
            answer = conversation.ask(device.tokenizer.continue_chat([], [], question.turns[0]), _GREEDY)
            while conversation.answering and len(answer.tokens) < settings.after:
                conversation.next_round()
        except RefusedError as refusal:
            if refusal.code != "CONTEXT_FULL":
                raise
            return str(refusal)
        if not conversation.answering:
            return f"its answer ended with token {len(answer.tokens)}, before the cut"
        if len(conversation.committed) + longest > engine.max_context:
            return f"the target's context has no room for {longest} tokens after the cut"
        outage = Outage(conversation.cut(), verifier)
        texts = {"writer": outage.write(device.new_writer(), longest)} if device.new_writer else {}
        texts["moa"] = outage.write(drafter, longest)
        drafter.stopping_rule = None
        texts["moa-unbounded"] = outage.write(drafter, longest)
        texts |= {"ngram": outage.write(NgramDrafter(device.stop_tokens), longest), "nothing": []}
        kept = {writer: outage.reconnect(text) for writer, text in texts.items()}
    cut = outage.committed
    own = [step.token for step in decode(engine, cut, _GREEDY, longest)]
    written = {writer: Written(Text(text, score(cut, text)), kept[writer]) for writer, text in texts.items()}
    return Trial(question.turns[0], answer, Text(own, score(cut, own)), written)


class _UpTo:
    """A controller of chains that commit no more than ``length`` tokens, a bonus token in each round included.
    Implements :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    def __init__(self, length: int) -> None:
        self._left = length

    def budget(self) -> Budget:
        most = min(_DRAFT_LENGTH, self._left - 1)
        return Budget.chain(most, nodes=most)

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    @property
    def token_s(self) -> float:
        return 0.0

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self._left -= outcome.accepted + 1


def show_trial(trial: Trial, tokenizer: ChatTokenizer) -> None:
    """Print one question to stderr: the answer up to the cut, every writer's text, and the target's own."""
    show_answer(trial.question, trial.answer.tokens, trial.answer.origins, tokenizer)
    for writer, written in trial.written.items():
        tokens, kept = written.text.tokens, written.kept
        if tokens:
            marks = [MARKS[Origin.OFFLINE]] * kept + [ROLLED_BACK] * (len(tokens) - kept)
            title = f"> written offline by {writer}, {kept} of {len(tokens)} tokens kept:"
            show_tokens(title, tokens, marks, tokenizer)
    own = trial.target.tokens
    show_tokens("> the target itself:", own, [MARKS[Origin.CORRECTED]] * len(own), tokenizer)


def _rows(result: Result, *names: str) -> list[list[object]]:
    return [
        [writer, int(length), *(figures[name] for name in names)]
        for writer, lengths in result["writers"].items()
        for length, figures in lengths.items()
    ]
