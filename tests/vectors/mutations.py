"""Mistakes in the client session: each of them breaks a trace, so a port that makes one is found out.

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
from vectors.replaying import BROKEN


class Mutation(NamedTuple):
    """In ``session/<module>.py`` ``new`` stands in place of ``old``, which occurs there once."""

    module: str
    old: str
    new: str


MUTATIONS = (
    Mutation("state", "found = len(self._tentative) > after", "found = len(self._tentative) >= after"),
    Mutation("state", "self._origins[after:] = [", "self._origins[after + 1 :] = ["),
    Mutation(
        "state", "self.policy is Policy.KEEP and Origin.OFFLINE in rest_origins", "Origin.OFFLINE in rest_origins"
    ),
    Mutation("state", "Origin.DRAFTED if at < accepted", "Origin.DRAFTED if at <= accepted"),
    Mutation("state", "bool(rest) and agreed < len(tokens)", "bool(rest)"),
    Mutation("state", "RolledBack(start + agreed, ", "RolledBack(start, "),
    Mutation("state", "self.rows = min(self.rows, length)", "pass"),
    Mutation("state", "end - 1 - start", "end - start"),
    Mutation("state", "[token for token in tokens if token not in self._stop_tokens]", "list(tokens)"),
    Mutation("state", "self._kept += len(kept)", "self._kept = len(self._supplied)"),
    Mutation("client", "False\n        self._outgoing.begin_epoch(len(self.committed))", "False"),
    Mutation("client", "self._answer_start + max_new_tokens if", "max_new_tokens if"),
    Mutation("client", "Outgoing(saved.epoch, saved.connection)", "Outgoing(saved.epoch)"),
    Mutation("client", "        self._cut(start)\n", ""),
    Mutation("exchange", "else min(most, self.limits.max_draft_tokens)", "else most"),
    Mutation("exchange", "if tree is not None and self.limits.trees:", "if tree is not None:"),
    Mutation("exchange", "or verdict.epoch != self._outgoing.epoch", "or verdict.epoch < self._outgoing.epoch"),
    Mutation("exchange", "if not new or (behind and self._supplied):", "if not new:"),
    Mutation("exchange", "max(0, verdict.accepted - behind)", "verdict.accepted"),
    Mutation("exchange", "ours = 0", "ours = accepted"),
    Mutation("exchange", "min(verdict.rows_until, len(self.committed))", "verdict.rows_until"),
    Mutation("exchange", " and standing.serial == self._outgoing.serial", ""),
    Mutation("exchange", "self._out_of_sync > _MOST_OUT_OF_SYNC", "self._out_of_sync >= _MOST_OUT_OF_SYNC"),
    Mutation("exchange", "self._outgoing.in_flight, self._out_of_sync = None, 0", "self._outgoing.in_flight = None"),
    Mutation("exchange", "min(self._server_length, len(self.committed) - 1)", "self._server_length"),
    Mutation("exchange", "(self.held and len(self._supplied) == self._kept)", "self.held"),
    Mutation("exchange", "same_epoch and agreed == len(self.committed)", "agreed == len(self.committed)"),
    Mutation("exchange", "if welcome.epoch and not same_epoch:", "if not same_epoch:"),
    Mutation("exchange", "if welcome.verdict_follows:", "if False:"),
    Mutation("exchange", "or (self.answering and self._outgoing.repeated)", ""),
    Mutation("outgoing", "self.awaits_standing, self.serial, self.repeated = False, 0, False", "self.repeated = False"),
    Mutation("outgoing", "if begun > epoch", "if begun >= epoch"),
    Mutation("outgoing", "max(self.connection, connection)", "connection"),
    Mutation("outgoing", "self.in_flight = None\n        self.end_credit()", "self.in_flight = None"),
    Mutation("outgoing", "if self.credit or self.awaits_standing:", "if self.credit:"),
    Mutation("link", " and asked and not self._outgoing.awaits_standing", " and asked"),
    Mutation("link", "self._outgoing.credit > known", "self._outgoing.credit >= known"),
    Mutation("incoming", "if rows.start > held or count < 1", "if count < 1"),
    Mutation("incoming", "or verdict.accepted > len(verdict.tokens)", ""),
    Mutation("rows", ".reshape(shape) * scales", ".reshape(shape)"),
    Mutation("handshake", 'np.asarray(tokens, "<u4")', 'np.asarray(tokens, ">u4")'),
)


def broken_by(mutation: Mutation) -> str:
    """The step of the first trace that the mutation breaks; empty where it breaks none.

    Raises:
        ValueError: the mutation does not fit the source.
        RuntimeError: the traces could not be played.
    """
    package = Path(moa_runtime.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / "session" / f"{mutation.module}.py"
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise ValueError(f"{mutation.module}.py has {source.count(mutation.old)} of {mutation.old!r}")
        path.write_text(source.replace(mutation.old, mutation.new))
        folders = [folder, str(Path(__file__).parents[1])]
        ran = subprocess.run(
            [sys.executable, "-m", "vectors.replaying", str(copy)],
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
