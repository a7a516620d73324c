"""Writes the vectors: ``make vectors``."""

from __future__ import annotations

import sys

from vectors import trace_files
from vectors.figures import figures_of
from vectors.loop_coverage import REQUIRED_OF_LOOPS, features_of_loop
from vectors.loop_recorder import loop_walks
from vectors.texts import texts, write_tokenizer
from vectors.trace_coverage import REQUIRED, features
from vectors.trace_groups import GROUPS


def main() -> None:
    shown: set[str] = set()
    for name, make in GROUPS.items():
        traces = make()
        shown.update(*(features(trace.steps) for trace in traces))
        changed = trace_files.write(f"session/{name}", [{"name": trace.name, "steps": trace.steps} for trace in traces])
        print(f"session/{name}: {len(traces)} traces, {'written' if changed else 'as before'}")
    walks = loop_walks()
    changed = trace_files.write("loop/walks", walks)
    print(f"loop/walks: {len(walks)} traces, {'written' if changed else 'as before'}")
    shown.update(*(features_of_loop(walk["steps"]) for walk in walks))
    write_tokenizer()
    for folder, made in (("figures", figures_of()), ("texts", texts())):
        for name, cases in made.items():
            changed = trace_files.write(f"{folder}/{name}", cases)
            print(f"{folder}/{name}: {len(cases)} cases, {'written' if changed else 'as before'}")
    missing = (REQUIRED | REQUIRED_OF_LOOPS) - shown
    if missing:
        sys.exit(f"no trace shows: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
