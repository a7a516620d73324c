"""Writes the vectors: ``PYTHONPATH=tests python -m vectors``."""

from __future__ import annotations

import sys

from vectors import files
from vectors.covered import REQUIRED, features
from vectors.session_groups import GROUPS


def main() -> None:
    shown: set[str] = set()
    for name, make in GROUPS.items():
        traces = make()
        shown.update(*(features(trace.steps) for trace in traces))
        changed = files.write(f"session/{name}", [{"name": trace.name, "steps": trace.steps} for trace in traces])
        print(f"session/{name}: {len(traces)} traces, {'written' if changed else 'as before'}")
    missing = REQUIRED - shown
    if missing:
        sys.exit(f"no trace shows: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
