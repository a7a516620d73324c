"""A table of attacks: what an honest session waits for its steps, alone and during each.

>>> python -m soak.attacks --seconds 8     # with PYTHONPATH=tests:tools

The verifier and the honest session run on the first processor, the attackers on the others. With ``--gateway`` it is
``moa-chat --serve`` that is attacked, and a client that streams completions waits for their pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from moa_server.settings import ENGINES
from soak import honest
from soak.run import _TINY, _tiny
from soak.served import Served, served
from support.chat.programs import gateway
from support.server.attacks import MEMBERS, STRANGERS, Victim, keep_up
from support.tiny import make_tiny_bundle

_COUNTS = {"idle sockets": 512, "slow bodies": 900, "header byte by byte": 32, "half handshakes": 512}
#: Seconds that the last step of a row is waited for.
_LONGEST_S = 120.0


def attackers(victim: Victim, cpus: set[int], orders: Any) -> None:
    """Attack as ordered, ``(name, seconds, connections)``, in a process of one's own; say how many were made."""
    os.sched_setaffinity(0, cpus)
    while True:
        name, seconds, count = orders.recv()
        run = {**STRANGERS, **MEMBERS}[name]
        with ThreadPoolExecutor(count) as pool:
            made = list(pool.map(keep_up, [run] * count, [victim] * count, [seconds] * count))
        orders.send(sum(made))


def steps(here: Any, seconds: float) -> list[float]:
    """Milliseconds of each step that an honest session made, the one under way at the end included."""
    while here.poll():
        here.recv()
    found, until = list[float](), time.monotonic() + seconds
    # Read all the time: a full pipe would stop the session.
    while here.poll(max(0.0, until + _LONGEST_S - time.monotonic())):
        kind, value = here.recv()
        if kind == "differs":
            print(f"attacks: {value}", file=sys.stderr)
        elif kind == "draft":
            found.append(1000 * value)
            if time.monotonic() > until:
                return sorted(found)
    return [*sorted(found), 1000 * _LONGEST_S]


def row(name: str, found: Sequence[float], more: str = "") -> str:
    if not found:
        return f"| {name} | no step | | | 0 {more}|"
    p99 = found[int(0.99 * (len(found) - 1))]
    return f"| {name} | {median(found):.1f} | {p99:.1f} | {found[-1]:.0f} | {len(found)} {more}|"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m soak.attacks", description="Attack a verifier.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack (default: %(default)g)")
    parser.add_argument("--attackers", type=int, default=4, help="connections at once (default: %(default)d)")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="(default: %(default)s)")
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--gateway", action="store_true", help="attack the gateway, by strangers")
    parser.add_argument("--only", nargs="*", help="names of attacks (default: all)")
    options = parser.parse_args(argv)
    cpus = sorted(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    os.sched_setaffinity(0, {cpus[0]})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = _tiny(folder, 32 if options.engine == "vllm" else 16)
        made = served(folder / "log", ["--engine", options.engine, "--threads", "1", *models], *_TINY, tls=options.tls)
        running = stack.enter_context(made)
        target = running.target
        victim, names = Victim(target.port, target.fingerprints, tls=options.tls), [*STRANGERS, *MEMBERS]
        here, there = spawn.Pipe()
        if options.gateway:
            bundle = make_tiny_bundle(folder / "bundle", Path(models[1]), Path(models[3]), "none")
            program = stack.enter_context(gateway(bundle, target.verifier.url))
            # Its lines are read: a full pipe would stop it.
            threading.Thread(target=lambda: deque(program.process.stderr, 0), daemon=True).start()
            running = Served(target, psutil.Process(program.process.pid), running.log)
            victim, names = Victim(program.port, target.fingerprints, path="/v1/completions"), list(STRANGERS)
            process = spawn.Process(target=honest.ask, args=(program.port, there), daemon=True)
        else:
            known = honest.references(target, 4, 0)
            process = spawn.Process(target=honest.run, args=(target, known, 0, there), daemon=True)
        process.start()
        orders, theirs = spawn.Pipe()
        attacking = spawn.Process(target=attackers, args=(victim, set(cpus[1:] or cpus), theirs), daemon=True)
        attacking.start()
        orders.send((next(iter(STRANGERS)), 0.0, 1))
        orders.recv()  # all is imported
        print("| attack | p50 ms | p99 | max | steps | connections | MB | descriptors |\n" + "| --- " * 8 + "|")
        for name in options.only or names:
            print(row("alone", steps(here, options.seconds), "| | | "), flush=True)
            before = running.memory, running.descriptors
            orders.send((name, options.seconds + 0.5, _COUNTS.get(name, options.attackers)))
            time.sleep(0.2)
            found = steps(here, options.seconds)
            made = orders.recv()
            time.sleep(1)
            grown = f"| {made} | {before[0] / 1e6:.0f}, {running.memory / 1e6:.0f} "
            print(row(name, found, f"{grown}| {before[1]}, {running.descriptors} "), flush=True)
        attacking.kill()
        process.kill()
        log = (folder / "log").read_text()
        print(json.dumps({"log_bytes": len(log), "log": log[:2000]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
