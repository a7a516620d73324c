"""Mistakes in session and loop: each of them breaks a trace, so a port that makes one is found out.

``PYTHONPATH=tests python -m vectors.mutations`` makes them one by one, in a copy of the runtime.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import moa_runtime
from vectors.playing_all import BROKEN


class Mutation(NamedTuple):
    """In ``<module>.py`` of the runtime ``new`` stands in place of ``old``, which occurs there once."""

    module: str
    old: str
    new: str


MUTATIONS = (
    Mutation("session/state", "found = len(self._tentative) > after", "found = len(self._tentative) >= after"),
    Mutation("session/state", "self._origins[after:] = [", "self._origins[after + 1 :] = ["),
    Mutation(
        "session/state",
        "self.policy is Policy.KEEP and Origin.OFFLINE in rest_origins",
        "Origin.OFFLINE in rest_origins",
    ),
    Mutation("session/state", "Origin.DRAFTED if at < accepted", "Origin.DRAFTED if at <= accepted"),
    Mutation("session/state", "bool(rest) and agreed < len(tokens)", "bool(rest)"),
    Mutation("session/state", "RolledBack(start + agreed, ", "RolledBack(start, "),
    Mutation("session/state", "self.rows = min(self.rows, length)", "pass"),
    Mutation("session/state", "end - 1 - start", "end - start"),
    Mutation("session/state", "[token for token in tokens if token not in self._stop_tokens]", "list(tokens)"),
    Mutation("session/state", "self._kept += len(kept)", "self._kept = len(self._supplied)"),
    Mutation("session/client", "False\n        self._outgoing.begin_epoch(len(self.committed))", "False"),
    Mutation("session/client", "self._answer_start + max_new_tokens if", "max_new_tokens if"),
    Mutation("session/client", "Outgoing.restored(saved.epoch, saved.connection)", "Outgoing.restored(saved.epoch, 0)"),
    Mutation("session/client", "        self._cut(start)\n", ""),
    Mutation("session/exchange", "else min(most, self.limits.max_draft_tokens)", "else most"),
    Mutation("session/exchange", "if tree is not None and self.limits.trees:", "if tree is not None:"),
    Mutation("session/incoming", "getattr(message, event).epoch != epoch", "getattr(message, event).epoch < epoch"),
    Mutation("session/incoming", "message.fault.epoch not in (0, epoch)", "False"),
    Mutation("session/exchange", "if not new or (behind and self._supplied):", "if not new:"),
    Mutation("session/exchange", "max(0, verdict.accepted - behind)", "verdict.accepted"),
    Mutation("session/exchange", "ours = 0", "ours = accepted"),
    Mutation("session/exchange", "min(verdict.rows_until, len(self.committed))", "verdict.rows_until"),
    Mutation("session/exchange", "standing.serial == self._outgoing.serial", "True"),
    Mutation("session/exchange", "self._out_of_sync > _MOST_OUT_OF_SYNC", "self._out_of_sync >= _MOST_OUT_OF_SYNC"),
    Mutation(
        "session/exchange", "self._outgoing.in_flight, self._out_of_sync = None, 0", "self._outgoing.in_flight = None"
    ),
    Mutation("session/exchange", "min(self._server_length, len(self.committed) - 1)", "self._server_length"),
    Mutation("session/exchange", "(self.held and len(self._supplied) == self._kept)", "self.held"),
    Mutation("session/exchange", "if not same_epoch or agreed != self._known:", "if agreed != self._known:"),
    Mutation("session/exchange", "if welcome.epoch and not same_epoch:", "if not same_epoch:"),
    Mutation("session/exchange", "if welcome.verdict_follows:", "if False:"),
    Mutation("session/exchange", "self._verdict(message.verdict) if self._outgoing.repeated else []", "[]"),
    Mutation(
        "session/outgoing",
        "self.awaits_standing, self.serial, self.repeated = False, 0, False",
        "self.repeated = False",
    ),
    Mutation("session/outgoing", "outgoing._step = _LEAP", "pass"),
    Mutation("session/outgoing", "if begun > epoch", "if begun >= epoch"),
    Mutation("session/outgoing", "max(self.connection, connection)", "connection"),
    Mutation("session/outgoing", "self.in_flight = None\n        self.end_credit()", "self.in_flight = None"),
    Mutation("session/outgoing", "if self.credit or self.awaits_standing:", "if self.credit:"),
    Mutation("session/link", "self._outgoing.credit > self._known", "self._outgoing.credit >= self._known"),
    Mutation("session/link", "State.OWING if self._owes_prompt else State.DRAFTING", "State.DRAFTING"),
    Mutation(
        "session/client_states",
        "            State.LENT: _to(State.LENT),\n",
        "            State.LENT: _to(State.LENT),\n            State.RECLAIMING: _to(State.LENT),\n",
    ),
    Mutation("session/client_states", "State.DRAFTING: Row(Does.COMMIT_COPY, ", "State.DRAFTING: Row(Does.DROP, "),
    Mutation("session/client_states", "**dict.fromkeys(AWAITING, Row(", "**dict.fromkeys([State.LENT], Row("),
    Mutation("session/client_states", "dict.fromkeys(_OURS | _AWAY, Row(", "dict.fromkeys(_OURS, Row("),
    Mutation("session/incoming", "if rows.start > held or count < 1", "if count < 1"),
    Mutation("session/incoming", "or verdict.accepted > len(verdict.tokens)", ""),
    Mutation("session/rows", ".reshape(shape) * scales", ".reshape(shape)"),
    Mutation("session/handshake", 'np.asarray(tokens, "<u4")', 'np.asarray(tokens, ">u4")'),
    Mutation("loop", "draft[: self._session.room]", "draft"),
    Mutation("decisions", "<= _CREDIT - _RENEWED_AFTER", "< _CREDIT - _RENEWED_AFTER"),
    Mutation("loop", "reason is not None and reason is not self._paused", "reason is not None"),
    Mutation("arrivals", "self._session.rows = self._drafter.rows", "pass"),
    Mutation("arrivals", "if self._session.rows_coming:", "if False:"),
    Mutation(
        "decisions", "self._controller.ahead(tentative - self._rounds.sent_path, ", "self._controller.ahead(tentative, "
    ),
    Mutation("decisions", "tentative < self._settings.offline_limit", "tentative <= self._settings.offline_limit"),
    Mutation("decisions", "max(earliest, session.answer_start)", "earliest"),
    Mutation("decisions", "(self._alone and self._session.supplied)", "False"),
    Mutation("rounds", "max(tree.depth, tentative)", "tree.depth"),
    Mutation(
        "rounds", "self._steps, self._draft_s, self.resumed = (), 0.0, tentative > 0", "self.resumed = tentative > 0"
    ),
    Mutation("session/exchange", "max(1, verdict.sharing)", "1"),
    Mutation("lessons", "verdict.compute_s, verdict.sharing)", "verdict.compute_s)"),
    Mutation("rounds", "*taken, verdict.sharing, scores)", "*taken)"),
    Mutation("lessons", "if ours and not (rounds.resumed and verdict.drafted):", "if ours:"),
    Mutation("link_watch", "math.inf if sent is None or self.late", "math.inf if sent is None"),
    Mutation("link_watch", "self._resend_at = self._rows_by = None", "self._rows_by = None"),
    Mutation("link_watch", "elif self._down_since is None and not self.outage:", "elif not self.outage:"),
    Mutation("budgets", "max(0, budget.levels - tentative)", "budget.levels"),
    Mutation("trial", "self.next = start + 1", "self.next = start"),
    Mutation("placement", "self._waits = max(0, self._waits - tokens)", "self._waits = max(0, self._waits - 1)"),
    Mutation("throughput", "self._sharing = outcome.sharing", "pass"),
    Mutation("throughput", "self._reads = False\n            self._right", "self._right"),
    Mutation("drafters/mixture", "(1 - weight) * math.exp", "math.exp"),
    Mutation("drafters/ngram", "reversed(followers)", "followers"),
    Mutation("drafters/luck", "rest + OTHERS * self._heat**2", "rest"),
    Mutation("noise", "+ number + 1)", "+ number)"),
    Mutation("tokenizer", "return [*self.encode(piece), *tokens]", "return tokens"),
)


def broken_by(mutation: Mutation) -> str:
    """The step of the first trace that the mutation breaks; empty where it breaks none.

    Raises:
        ValueError: the mutation does not fit the source.
        RuntimeError: the traces could not be played.
    """
    package, what = Path(moa_runtime.__file__).parent, "sessions" if mutation.module.startswith("session/") else "rest"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / f"{mutation.module}.py"
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise ValueError(f"{mutation.module}.py has {source.count(mutation.old)} of {mutation.old!r}")
        path.write_text(source.replace(mutation.old, mutation.new))
        folders = [folder, str(Path(__file__).parents[1])]
        ran = subprocess.run(
            [sys.executable, "-m", "vectors.playing_all", str(copy), what],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            capture_output=True,
            text=True,
        )
    if ran.returncode not in (0, BROKEN):
        raise RuntimeError(ran.stderr)
    return ran.stdout.strip()


def survivors() -> Iterator[Mutation]:
    """Those that no trace finds."""
    for mutation in MUTATIONS:
        broken = broken_by(mutation)
        print(f"{mutation.module}: {mutation.new!r}: {broken[:150] or 'NOT FOUND'}", flush=True)
        if not broken:
            yield mutation


if __name__ == "__main__":
    sys.exit(len(list(survivors())))
