"""Writes the vectors: ``make vectors``.

The recorded conversations contain their calls and the server's frames, so their results are written anew by playing
them. Results that agree with the recorded ones up to rounding stay as they are. To add conversations, name a group and
a file of JSON lines, as in ``PYTHONPATH=tests python -m vectors session/scripts new.jsonl``. A step has ``call`` and
``args``, or ``set`` and ``value`` for an attribute, and an empty ``frames`` if frames are taken after it:

    {"name": "no rows", "steps": [
      {"call": "create", "args": {"fingerprints": {"target": "a", "tokenizer": "b", "drafter": "c"}, "stop_tokens": [0],
        "policy": "rollback", "row_encoding": 1, "vocab_size": 13}},
      {"set": "wants_rows", "value": false},
      {"call": "connect", "args": {}, "frames": []}]}

(in one line). An attribute that frames show needs no line in ``trace_replay._LIVE``, which adds it to every trace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vectors import trace_files
from vectors.figures import figures_of
from vectors.loop_replay import alike, play_loop
from vectors.texts import texts, write_tokenizer
from vectors.trace_replay import play

PLAYERS = {"session/walks": play, "session/spelled_out": play, "session/scripts": play, "loop/walks": play_loop}


def played(trace: dict[str, Any], player: Any) -> dict[str, Any]:
    """Return a trace with its present results; steps that agree up to rounding stay as they are."""
    steps = [old if alike(new, old) else new for old, new in zip(trace["steps"], player(trace["steps"]), strict=True)]
    return {"name": trace["name"], "steps": steps}


def as_recorded(name: str, cases: list[Any]) -> list[Any]:
    """Return cases; those that agree with the recorded ones up to rounding stay as they are."""
    recorded = dict(enumerate(trace_files.read(name)))
    return [recorded[index] if alike(case, recorded.get(index)) else case for index, case in enumerate(cases)]


def main(group: str = "", file: str = "") -> None:
    write_tokenizer()
    made = {name: [played(trace, player) for trace in trace_files.read(name)] for name, player in PLAYERS.items()}
    if file:
        made[group] += [played(json.loads(line), PLAYERS[group]) for line in Path(file).read_text().splitlines()]
    for folder, parts in (("figures", figures_of()), ("texts", texts())):
        made |= {f"{folder}/{name}": as_recorded(f"{folder}/{name}", cases) for name, cases in parts.items()}
    for name, values in made.items():
        print(f"{name}: {len(values)}, {'written' if trace_files.write(name, values) else 'as before'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
