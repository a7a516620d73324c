"""The drafts of one piece of a session's work: from what is offered when its step is planned to the verdict on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from moa_runtime.session.server import ServerSession, SessionDraft, Verify
from moa_runtime.session.tree import depths, parents_among
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.drafting.own_draft import OwnDraft
from moa_server.drafting.server_drafting import Round, ServerDrafting
from moa_server.scheduling.step_cost import StepSeconds
from moa_server.scheduling.verify_job import Job, PricedDraft

#: Most microseconds that a message can tell.
MOST_US = (1 << 32) - 1
#: Bins of claims between 0 and 1, and levels of tokens without a claim.
_BINS, _LEVELS = 10, 8
#: Weight of a claim, in tokens that the target has judged; tokens without a claim are assumed right half of the time.
_TRUST, _UNCLAIMED = 4.0, 0.5
#: Weight that a judged token has lost after another one of its bin.
_FORGETTING = 1 / 200
#: Weight that a verdict has lost after another one in the ratio of accepted tokens to predicted ones, and the number of
#: tokens by which drafts may fall short of their prediction before they are trusted less.
_AGEING, _SLACK = 1 / 64, 8.0


class Calibration:
    """The share of right tokens by claimed probability, or by level without claims, as the target's verdicts show it.

    Each bin is the mean of a beta distribution that begins at its claim. A client that claims too much gains nothing:
    after some verdicts its tokens count as often as they are right. A path is priced by the product of its bins, so a
    long wrong draft would cost the bin of its first token alone: all paths are multiplied by the share of predicted
    tokens that were accepted lately.
    """

    def __init__(self) -> None:
        claims = [(index + 0.5) / _BINS for index in range(_BINS)]
        self._claimed = [[_TRUST * claim, _TRUST] for claim in claims]  # right tokens, judged tokens
        self._unclaimed = [[_TRUST * _UNCLAIMED, _TRUST] for _ in range(_LEVELS)]
        self._predicted = self._accepted = 0.0  # tokens that were verified, and those of them that were right

    def paths(self, parents: Sequence[int], claims: Sequence[float] | None) -> list[float]:
        """Return the probability that a token of a draft and all before it are right, for each token.

        Args:
            parents: of the tokens, as in :mod:`moa_runtime.session.tree`.
            claims: the drafter's own probability of each token if its parent is right; None if it names none.
        """
        share = min(1.0, (self._accepted + _SLACK) / max(self._predicted, _SLACK))
        return [share * path for path in self._products(parents, claims)]

    def _products(self, parents: Sequence[int], claims: Sequence[float] | None) -> list[float]:
        means = [right / judged for right, judged in self._bins(parents, claims)]
        sums = [0.0] * (len(means) + 1)
        for parent, mean in zip(parents, means, strict=True):
            sums[parent] += mean
        if max(sums) > 1:
            means = _exclusive(parents, means)
        paths = [1.0]
        for parent, mean in zip(parents, means, strict=True):
            paths.append(paths[parent] * mean)
        return paths[1:]

    def learn(self, tokens: Sequence[int], parents: Sequence[int], claims: Sequence[float] | None, job: Job) -> None:
        """Learn from a verdict. The target has chosen a token after each accepted one, so it has judged each token with
        a right parent, whether that was verified or not.

        Args:
            tokens, parents, claims: of the whole draft.
            job: done.
        """
        right, last = set(job.path), job.path[-1] + 1 if job.path else 0
        for index, found in enumerate(self._bins(parents, claims)):
            parent = parents[index]
            if not parent or parent - 1 in right:
                chosen = index in right or (parent == last and tokens[index] == job.token)
                found[0] += chosen - _FORGETTING * found[0]
                found[1] += 1 - _FORGETTING * found[1]
        # Aged also if nothing was verified: else drafts that are trusted too little to be verified stay so for ever.
        paths = self._products(parents, claims) if job.verified else []
        self._predicted += sum(paths[index] for index in job.verified) - _AGEING * self._predicted
        self._accepted += len(job.path) - _AGEING * self._accepted

    def _bins(self, parents: Sequence[int], claims: Sequence[float] | None) -> list[list[float]]:
        if claims is None:
            return [self._unclaimed[min(level, _LEVELS) - 1] for level in depths(parents)]
        return [self._claimed[min(max(int(_BINS * claim), 0), _BINS - 1)] for claim in claims]


@dataclass
class Calibrations:
    """Calibrations of a session: its client's drafts; the verifier's copies and its model, which all sessions share."""

    device: Calibration = field(default_factory=Calibration)
    copies: Calibration = field(default_factory=Calibration)
    model: Calibration = field(default_factory=Calibration)

    def of_own(self, draft: OwnDraft) -> Calibration:
        """Return the calibration of a draft of the verifier."""
        return self.model if draft.modelled else self.copies


class StepDrafts:
    """The drafts for one piece of work: what its client asked to verify, or for work that no frame asked for, the
    likelier of the client's newest unsolicited draft and the verifier's own.

    Args:
        sequence: the engine's number of the session.
        calibrations: of the session.

    Attributes:
        paths: calibrated probability that a token of the draft and all before it are right, for each token.
        own_paths: the same of the verifier's own draft.
    """

    def __init__(self, session: ServerSession, sequence: int, calibrations: Calibrations, work: Verify) -> None:
        self._session, self._sequence, self._calibrations, self._work = session, sequence, calibrations, work
        self._own: ServerDrafting | None = None
        self._taken: SessionDraft | OwnDraft | None = None  # the client's or the verifier's
        self.paths: list[float] = []
        self.own_paths: list[float] = []

    def job(self, own: ServerDrafting | None, *, unasked: bool = True) -> Job:
        """Make the job.

        Args:
            own: the verifier's drafts, if it makes any.
            unasked: whether work that no frame asked for may have drafts.
        """
        work, self._own = self._work, own
        if work.pushed and not unasked:
            return Job(self._sequence, work.prefix, work.sampling, rows_from=work.rows_from)
        if not work.pushed:
            paths = self._calibrations.device.paths(work.parents, work.confidences)
            self.paths = paths = self._permitted(work.draft, work.parents, paths)
            return Job(self._sequence, work.prefix, work.sampling, work.draft, work.parents, work.rows_from, paths)
        starts = [work.rows_from, None if own is None else own.rows_from(self._sequence, work.prefix)]
        rows_from = min((start for start in starts if start is not None), default=None)
        return Job(self._sequence, work.prefix, work.sampling, rows_from=rows_from, source=self)

    def newest(self) -> PricedDraft:
        """See :meth:`moa_server.scheduling.verify_job.DraftSource.newest`."""
        work = self._work
        offers: list[tuple[SessionDraft | OwnDraft, list[float]]] = []
        if (sent := self._session.newest_draft()) is not None:
            offers.append((sent, self._calibrations.device.paths(sent.parents, sent.confidences)))
        if self._own is not None:
            made = self._own.offered(self._sequence, work.prefix, work.sampling, self._session.room)
            self.own_paths = self._calibrations.of_own(made).paths(made.parents, made.probabilities)
            offers.append((made, self.own_paths))
        offers = [(one, self._permitted(one.tokens, one.parents, paths)) for one, paths in offers]
        self._taken, self.paths = max(offers, key=lambda offer: sum(offer[1]), default=(None, []))
        if self._taken is None:
            return PricedDraft()
        return PricedDraft(self._taken.tokens, self._taken.parents, self.paths)

    def _permitted(self, tokens: Sequence[int], parents: Sequence[int], paths: list[float]) -> list[float]:
        """Return the probabilities, 0 for tokens that the grammar forbids: they are not worth verifying."""
        state, answer = self._work.sampling.state, self._answer(self._work.prefix)
        if state is None or not tokens:
            return paths
        return [path if able else 0.0 for path, able in zip(paths, state.allowed(answer, tokens, parents), strict=True)]

    def _answer(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the answer among those of the conversation."""
        return list(tokens[self._work.sampling.answer_from :])

    @property
    def round(self) -> Round:
        """The conversation of the coming step, as the verifier's own drafting sees it."""
        work = self._work
        return Round(self._sequence, work.prefix, work.sampling, self._session.room, self.paths)

    def verdict(self, job: Job) -> tuple[wire.ServerMessage, int]:
        """Commit the target's choice, learn from it, and build the verdict; queue the memory rows that came with it.

        Returns:
            the verdict, and the number of verified tokens.
        """
        session, work, taken, own = self._session, self._work, self._taken, self._own
        device, stamp = self._calibrations.device, 0
        if work.pushed:
            whole = (taken.tokens, taken.parents) if taken is not None else ((), ())
            if isinstance(taken, OwnDraft):
                own_calibration = self._calibrations.of_own(taken)
                own_calibration.learn(taken.tokens, taken.parents, taken.probabilities, job)
            elif taken is not None:
                device.learn(taken.tokens, taken.parents, taken.confidences, job)
                stamp = taken.stamp
        else:
            whole = work.draft, work.parents
            device.learn(work.draft, work.parents, work.confidences, job)
            stamp = work.stamp if len(job.verified) < len(work.draft) else 0
        tokens, parents, path = only_verified(*whole, job.verified, job.path)
        done = replace(work, draft=tokens, parents=parents)
        assert job.token is not None
        spent = (min(int(1e6 * each), MOST_US) for each in (job.seconds, job.drafting_s))
        decided, forced = [*work.prefix, *(tokens[index] for index in path), job.token], list[int]()
        if (state := work.sampling.state) is not None and work.sampling.logprobs is None:  # which a pass computes
            forced = state.forced(self._answer(decided))
        message = session.decide(done, path, job.token, *spent, draft_stamp=stamp, forced=forced, logprobs=job.logprobs)
        if work.rows_from is not None or (session.may_make_rows and job.rows is not None):  # made for the verifier
            take_rows(session, job)
        if work.pushed and own is not None:
            if isinstance(taken, OwnDraft):
                own.learn(self._sequence, taken, job.verified, job.path)
            own.add_rows(self._sequence, [*work.prefix, *(tokens[index] for index in path)], job.rows)
        return message, len(tokens)


def only_verified(
    tokens: Sequence[int], parents: Sequence[int], verified: Collection[int], path: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """Reduce a draft to the tokens at the indices ``verified``, a tree; return its tokens and parents, and the path in
    it."""
    kept = sorted(verified)
    return (
        tuple(tokens[index] for index in kept),
        tuple(parents_among(kept, parents)),
        [kept.index(index) for index in path],
    )


async def prepare_drafts(
    own: ServerDrafting, jobs: Sequence[Job], seconds: StepSeconds, row_s: float, least_gain: float
) -> bool:
    """Let the verifier draft for those jobs of the coming step for which that pays; return whether there is anything
    new."""
    rounds = [job.source.round for job in jobs if isinstance(job.source, StepDrafts)]
    return bool(rounds) and await own.prepare(rounds, seconds, row_s, least_gain)


def take_rows(session: ServerSession, job: Job) -> None:
    """Give a session its job's memory rows; disable rows if the engine made none."""
    if job.rows is None:
        session.disable_rows()
    else:
        session.add_rows(job.rows.start, job.rows.keys, job.rows.values)


def _exclusive(parents: Sequence[int], means: Sequence[float]) -> list[float]:
    """Limit each token to what its likelier siblings leave, for only one of them can be right: otherwise many siblings
    of a new client would be verified for nothing."""
    left, limited = [1.0] * (len(means) + 1), list(means)
    for index in sorted(range(len(means)), key=lambda each: -means[each]):
        limited[index] = min(means[index], left[parents[index]])
        left[parents[index]] -= limited[index]
    return limited
