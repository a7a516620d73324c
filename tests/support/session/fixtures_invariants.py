"""Invariants of a conversation, whatever the link, the server and the processes do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis.stateful import RuleBasedStateMachine, invariant

from moa_runtime.session.events import Cause, Committed, Decided, Origin, RolledBack, SessionEvent
from support.session.fixtures_pair import Pair, rows_of


@dataclass(frozen=True)
class Known:
    """Facts of a conversation that the invariants need.

    Attributes:
        expected: the target's own text.
        prompt_end: where its last answer begins.
        limit: where that must end.
        written: tokens that were made tentative.
        branched: drafted tokens that were never tentative, for they stood on a branch.
        kept: tokens that the user kept.
    """

    expected: tuple[int, ...] = ()
    prompt_end: int = 0
    limit: int = 0
    written: int = 0
    branched: int = 0
    kept: int = 0


class InvariantMachine(RuleBasedStateMachine):
    """A pair with invariants. The rules of subclasses keep ``known`` up to date.

    Attributes:
        server_forgot: the server may have less than the client.
    """

    def watch(self, pair: Pair) -> None:
        self.pair, self.known = pair, Known()
        self.server_forgot = False
        self._checked = 0  # frames of which the origins were

    @invariant()
    def committed_text_is_the_targets(self) -> None:
        self.check_text()

    def check_text(self) -> None:
        committed = self.pair.client.committed
        assert committed == list(self.known.expected[: len(committed)])

    @invariant()
    def rows_belong_to_the_committed_tokens(self) -> None:
        client = self.pair.client
        assert client.rows <= len(client.committed)
        assert self.pair.rows == rows_of(client.committed[: client.rows])

    @invariant()
    def a_duplicate_never_truncates_the_server(self) -> None:
        if not self.server_forgot:
            assert len(self.pair.server.session.committed) >= len(self.pair.client.committed)

    @invariant()
    def every_drafted_token_is_accounted_for(self) -> None:
        for before, events in self.pair.taken[self._checked :]:
            self.check_origins(before, events)
        self._checked = len(self.pair.taken)
        self.check_accounts()

    def check_origins(self, before: tuple[tuple[int, Origin], ...], events: list[SessionEvent]) -> None:
        """A token of the suffix keeps its origin; another one was drafted on a branch, or is the target's."""
        decisions = [event for event in events if isinstance(event, Decided)]
        accepted = [
            0 if event.cause is Cause.PUSHED and not event.draft_stamp else event.accepted for event in decisions
        ]
        for event in decisions:
            assert event.accepted >= 0 and (event.cause is Cause.PUSHED or event.drafted <= event.sent)
        commits = [event for event in events if isinstance(event, Committed)]
        if not accepted:
            # A Welcome may say that the server has what the user kept.
            assert all(origin is Origin.KEPT for commit in commits for origin in commit.origins)
            return
        kept = tuple(pair for pair in before if pair[1] is Origin.KEPT)
        if kept:
            assert tuple(zip(commits[0].tokens, commits[0].origins, strict=True)) == kept
        suffix, decided, stands = before[len(kept) :], commits[-1], True
        assert len(commits) == 1 + bool(kept)
        for at, (token, origin) in enumerate(zip(decided.tokens, decided.origins, strict=True)):
            stands = stands and at < len(suffix) and suffix[at][0] == token
            if stands:
                assert origin is suffix[at][1]
            elif at < accepted[0]:
                assert origin is Origin.DRAFTED
                self.known = replace(self.known, branched=self.known.branched + 1)
            else:
                assert origin is Origin.CORRECTED

    def check_accounts(self) -> None:
        accepted = [o for e in self.pair.events if isinstance(e, Committed) for o in e.origins]
        rolled_back = sum(len(e.tokens) for e in self.pair.events if isinstance(e, RolledBack))
        confirmed = sum(origin in (Origin.DRAFTED, Origin.OFFLINE) for origin in accepted)
        made = self.known.written + self.known.branched
        assert made == confirmed + rolled_back + len(self.pair.client.tentative)
