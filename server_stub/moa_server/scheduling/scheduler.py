"""Scheduler: chooses the requests of the next step. Pure: jobs and clock readings in, requests out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moa_server.engine.base import StepRequest
from moa_server.scheduling.draft_choice import DraftGain, DraftSearch, choose_nodes
from moa_server.scheduling.step_cost import Float64, StepCost, showing_price
from moa_server.scheduling.verify_job import Job

#: While others are being served, the longest step, as a multiple of a step with one token for each of them: with a
#: prompt but without drafts, and with drafts but without a prompt.
STRETCH = 2.25
#: While others are being served, the longest step for other work, as a multiple of a step with one token: their next
#: frames wait for it.
ASIDE_STRETCH = 1.25
#: Longest predicted forward of a step in seconds, whether or not others wait. A single token may exceed it.
LONGEST_S = 0.25
#: Seconds after its last step for which a sequence counts as being served: its next frame is on its way.
ATTENTIVE_S = 2.0
#: Sequences in one step at most.
MOST_SEQUENCES = 64
#: Number of tokens at a prefix's beginning that a sequence holds: ``held(sequence, prefix)``.
Held = Callable[[int, Sequence[int]], int]


@dataclass
class Waiting:
    """A job in the queue.

    Attributes:
        since: clock reading when it was added, seconds.
        background: whether it may only use steps that no other job wants.
        started: whether a step has contained a piece of it.
    """

    job: Job
    since: float
    background: bool = False
    started: bool = False


@dataclass
class Piece:
    """One request of a step, with the number of tokens that the engine already holds."""

    waiting: Waiting
    request: StepRequest
    held: int

    @property
    def prefill(self) -> int:
        """Tokens of the prefix."""
        return max(0 if self.request.sampling is None else 1, len(self.request.prefix) - self.held)

    @property
    def tokens(self) -> int:
        return self.prefill + len(self.request.draft)

    @property
    def context(self) -> int:
        """Tokens of the sequence after the step, as if all of the draft were accepted."""
        return len(self.request.prefix) + len(self.request.draft)


@dataclass
class Step:
    """The pieces of one call of the engine, and the failed jobs with the engine's exceptions.

    Attributes:
        rate: predicted tokens a second of its rounds; 0 without rounds.
        seconds: predicted seconds of its rounds, with their drafts and memory rows.
        token_s: predicted seconds of each token of its rounds without drafts.
    """

    pieces: list[Piece] = field(default_factory=list)
    failed: list[tuple[Job, Exception]] = field(default_factory=list)
    rate: float = 0.0
    seconds: float = 0.0
    token_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def products(self) -> int:
        """Approximate number of pairs of a token and a token that it attends to."""
        return sum(piece.tokens * piece.context for piece in self.pieces)

    @property
    def contexts(self) -> int:
        """Tokens that the sequences hold."""
        return sum(piece.context for piece in self.pieces)

    @property
    def memory_rows(self) -> int:
        """Memory rows that are made, without those of accepted drafted tokens."""
        asked = [piece.request for piece in self.pieces if piece.request.rows_from is not None]
        return sum(max(0, len(request.prefix) - (request.rows_from or 0)) for request in asked)


class Scheduler:
    """Verification first, then prefill in pieces, round-robin over sequences.

    A sequence that is alone gets all of a step. If others are served too, a step takes at most :data:`STRETCH` times
    the predicted time (:class:`StepCost`) of one token for each of them, or ``step_tokens`` tokens if the operator
    set a limit, so a long prompt of one client does not delay the next token of another. To that come the drafted
    tokens that bring all sessions together the most tokens a second (:func:`choose_nodes`), with the same limit.

    Args:
        step_tokens: most tokens of a step while others are served; None for as many as the cost of steps allows.
        cache_tokens: tokens that the engine's caches hold together. Only prompts that fit together are read at once:
            otherwise they would evict each other in turns for ever.

    Attributes:
        rate: tokens a second of the last step with rounds, if it had no drafts.
        price: tokens that this rate brings in the time of a further drafted token, in the mean over some.
        gain: of drafts.
        search: for drafts.
    """

    def __init__(self, cost: StepCost, step_tokens: int | None = None, cache_tokens: int = 1 << 60) -> None:
        self._cost, self._step_tokens, self._cache_tokens = cost, step_tokens, cache_tokens
        self._queue: list[Waiting] = []  # those served least recently first
        self._served: dict[int, float] = {}  # sequence -> last step that gave it a token
        self.rate = self.price = 0.0
        self.gain, self.search = DraftGain(), DraftSearch()
        self._ended: float | None = None  # clock reading at the end of the last step

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def serving(self) -> int:
        """Number of sequences that got a token lately, or wait for their first."""
        return len(self._served.keys() | {waiting.job.sequence for waiting in self._queue if not waiting.background})

    @property
    def searches(self) -> bool:
        """Whether sessions shall look for drafts of the coming step."""
        return self.search.pays(self.serving)

    def add(self, waiting: Waiting) -> None:
        """Add a job to the queue."""
        self._queue.append(waiting)

    def drop(self, job: Job) -> None:
        """Remove a job if it is waiting."""
        self._queue = [waiting for waiting in self._queue if waiting.job is not job]

    def rest(self, sequence: int) -> None:
        """Stop counting a sequence as served: its answer has ended, or its client is gone."""
        self._served.pop(sequence, None)

    def plan(self, now: float, held: Held) -> Step:
        """Plan the next step; it has no pieces if nothing waits. Its jobs stay in the queue until :meth:`stepped`.
        Background jobs are in it if no other job is."""
        step = Step()
        self._served = {sequence: at for sequence, at in self._served.items() if now - at < ATTENTIVE_S}
        queue: list[tuple[Waiting, int]] = []
        wanted = [waiting for waiting in self._queue if not waiting.background]
        for waiting in wanted or self._queue:
            try:
                queue.append((waiting, held(waiting.job.sequence, waiting.job.prefix)))
            except Exception as error:
                step.failed.append((waiting.job, error))
        for job, _ in step.failed:
            self.drop(job)
        rounds = [entry for entry in queue if not entry[0].job.prefills(entry[1])][:MOST_SEQUENCES]
        prefills = [entry for entry in queue if entry[0].job.prefills(entry[1])]
        if self._served and not wanted:
            rounds = rounds[: self._few(rounds)]
        alone = len({waiting.job.sequence for waiting, _ in queue} | self._served.keys()) <= 1
        idle_s = 0.0 if self._ended is None else min(now - self._ended, ATTENTIVE_S)
        self._add_rounds(step, rounds, idle_s, alone=alone)
        self._add_prefills(step, self._admitted(prefills, rounds))
        return step

    def stepped(self, step: Step, now: float, between_s: float = 0.0) -> None:
        """Update the queue after a step whose outcomes are taken: remove finished jobs, move the others to the end.

        Args:
            between_s: processor seconds of the event loop since the last step.
        """
        for piece in step.pieces:
            piece.waiting.started = True
            heard = piece.waiting.job.done and not piece.waiting.background
            if heard and piece.waiting in self._queue:  # else its client left in the middle
                self._served[piece.waiting.job.sequence] = now
        self.search.steps += 1
        self._learn(step, now, between_s)
        self._ended = now
        ran = {id(piece.waiting) for piece in step.pieces}
        behind = [waiting for waiting in self._queue if id(waiting) in ran and not waiting.job.done]
        self._queue = [waiting for waiting in self._queue if id(waiting) not in ran] + behind

    def _learn(self, step: Step, now: float, between_s: float) -> None:
        jobs = [piece.waiting.job for piece in step.pieces]
        if (
            self._ended is None
            or not step.rate
            or len(_rounds_of(step)) < len(jobs)
            or not all(job.done for job in jobs)
        ):
            return
        serving, tokens = self.serving, sum(len(job.path) + 1 for job in jobs)
        searched, single_s = any(job.source is not None for job in jobs), tokens * step.token_s
        spared_s = max(single_s - step.seconds, -single_s)  # a stall while drafts are made says little of the next ones
        between_s = min(between_s, step.seconds)  # other work of the server says nothing of drafts
        if searched or not all(job.paths for job in jobs):  # those asked for their drafts do not look for others
            self.search.observe(serving, spared_s - between_s, searched=searched)
        if searched or any(job.paths for job in jobs):
            drafted, modelled = any(piece.request.draft for piece in step.pieces), any(job.drafting_s for job in jobs)
            measured = tokens / max(1e-6, now - self._ended)
            self.gain.observe(serving, step.rate, measured, drafted=drafted, modelled=modelled)

    def _few(self, rounds: Sequence[tuple[Waiting, int]]) -> int:
        """Return how many rounds go into a step that no served sequence wants."""
        context = max((len(waiting.job.prefix) for waiting, _ in rounds), default=0)
        counts = np.arange(1, len(rounds) + 1)
        seconds = self._cost.curve(counts, counts * context, counts * context, counts)
        return max(1, int(np.count_nonzero(seconds <= ASIDE_STRETCH * seconds[:1])))

    def waiting_rounds(self) -> list[Job]:
        """Return the jobs of clients that await their next token, and have a source of drafts."""
        rounds = [each.job for each in self._queue if each.job.source is not None and not each.background]
        return rounds[:MOST_SEQUENCES]

    def seconds_with(self, drafted: NDArray[np.int64], rounds: Sequence[tuple[Job, int]]) -> Float64:
        """Predict the seconds of a step with what each round lacks, for each number of drafted tokens.

        Args:
            rounds: jobs, with the number of tokens that the engine holds.
        """
        lengths = [len(job.prefix) for job, _ in rounds]
        sure = [max(1, length - held) for length, (_, held) in zip(lengths, rounds, strict=True)]
        context, mean = sum(lengths), sum(lengths) / max(1, len(lengths))
        computed = sum(count * length for count, length in zip(sure, lengths, strict=True))
        return self._cost.curve(sum(sure) + drafted, computed + mean * drafted, np.array(float(context)), len(rounds))

    def _add_rounds(self, step: Step, rounds: Sequence[tuple[Waiting, int]], idle_s: float, *, alone: bool) -> None:
        """Give each round what it lacks, and the drafted tokens that pay.

        Args:
            idle_s: seconds since the last step: the target will wait as long for the next drafts of devices.
        """
        jobs = [(waiting.job, held) for waiting, held in rounds]
        sure = sum(max(1, len(job.prefix) - held) for job, held in jobs)

        def seconds(drafted: NDArray[np.int64]) -> Float64:
            return idle_s + self.seconds_with(drafted, jobs)

        paths, least = [job.paths for job, _ in jobs], self.gain.least(self.serving)
        most = sum(map(len, paths))
        if not alone and self._step_tokens is not None:
            most = max(0, self._step_tokens - sure)
        elif not alone:
            spent = self.seconds_with(np.arange(1 + most), jobs)
            most = int(np.argmax(np.append(spent > STRETCH * spent[0], True))) - 1
        chosen = choose_nodes(paths, seconds, most=most, least_gain=least)
        if jobs:
            some = showing_price(len(jobs))
            without, with_some, with_chosen = seconds(np.array([0, some, sum(map(len, chosen))])).tolist()
            self.rate = len(jobs) / without
            step.token_s = (without - idle_s) / len(jobs)
            self.price = self.rate * (with_some - without) / some
        for (waiting, held), nodes in zip(rounds, chosen, strict=True):
            lacking = max(1, len(waiting.job.prefix) - held)
            step.pieces.append(Piece(waiting, waiting.job.request(held, lacking + len(nodes), nodes), held))
        if jobs:
            expected = len(jobs) + sum(each[node] for each, nodes in zip(paths, chosen, strict=True) for node in nodes)
            spent_s = max(job.drafting_s for job, _ in jobs) + self._cost.memory_seconds(step.memory_rows)
            step.seconds = with_chosen - idle_s + spent_s
            step.rate = expected / step.seconds

    def piece_alone(self, waiting: Waiting, held: int, most: int) -> Piece:
        """Return the next piece of a job for an engine that schedules itself; ``most`` tokens of it at most."""
        job, step = waiting.job, Step()
        if job.prefills(held) or job.sampling is None:
            return Piece(waiting, job.request(held, most), held)
        self._add_rounds(step, [(waiting, held)], 0.0, alone=True)
        return step.pieces[0]

    def _admitted(
        self, prefills: Sequence[tuple[Waiting, int]], rounds: Sequence[tuple[Waiting, int]]
    ) -> list[tuple[Waiting, int]]:
        """The prompts that fit into the cache beside the rounds, at least one; those that were begun come first."""
        room = self._cache_tokens - sum(_room_of(waiting.job) for waiting, _ in rounds)
        admitted: set[int] = set()
        for waiting, _ in sorted(prefills, key=lambda entry: (not entry[0].started, entry[0].since)):
            room -= _room_of(waiting.job)
            if admitted and room < 0:
                break
            admitted.add(id(waiting))
        return [entry for entry in prefills if id(entry[0]) in admitted]

    def _add_prefills(self, step: Step, prefills: Sequence[tuple[Waiting, int]]) -> None:
        """Give half of the prefill share to the next prompt in turn and half to the one with the fewest tokens left,
        so that short prompts overtake long ones."""
        if not prefills:
            return
        shortest = min(prefills, key=lambda entry: len(entry[0].job.prefix) - entry[1])
        turns = [prefills[0], *([] if shortest is prefills[0] else [shortest])]
        turns += [entry for entry in prefills[1:] if entry is not shortest]
        for number, (waiting, held) in enumerate(turns):
            room = self._prefill_room(step, waiting, held)
            if room < 1 or len(step.pieces) >= MOST_SEQUENCES + 1:
                return
            half = number == 0 and shortest is not prefills[0]
            step.pieces.append(Piece(waiting, waiting.job.request(held, max(1, room // 2) if half else room), held))

    def _prefill_room(self, step: Step, waiting: Waiting, held: int) -> int:
        """Tokens of prefill that still go into the step."""
        first = len(_rounds_of(step)) == len(step.pieces)
        others = bool(_rounds_of(step) or self._served.keys() - {waiting.job.sequence})
        if others and self._step_tokens is not None:
            return max(self._step_tokens - step.tokens, self._step_tokens // 4 if first else 0, 0)
        base = self._base(step)
        longest = STRETCH * base if others else max(LONGEST_S, 2 * base)
        prefilled = step.tokens - sum(piece.tokens for piece in _rounds_of(step))
        room = self._cost.fitting(longest - base, held) - prefilled
        return max(room, 1) if first else room  # the first prompt always proceeds, however full the step is

    def _base(self, step: Step) -> float:
        """Seconds of one token for each sequence that is served."""
        rounds = _rounds_of(step)
        context = max((len(piece.request.prefix) for piece in rounds), default=0)
        count = max(1, len(rounds))
        return self._cost.seconds(count, count * context, count * context, count)


def _rounds_of(step: Step) -> list[Piece]:
    """Return the pieces of a step that are no prefill."""
    verifying = [piece for piece in step.pieces if piece.request.sampling is not None]
    return [piece for piece in verifying if not piece.waiting.job.prefills(piece.held)]


def _room_of(job: Job) -> int:
    """Upper bound of the tokens that the engine reserves for a job's sequence."""
    return len(job.prefix) + job.draft_length + 128
