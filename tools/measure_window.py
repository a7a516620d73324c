"""Measure the window: ``python tools/measure_window.py``.

While an answer streams over an emulated link, keys are pressed in the composer, and the time until each one is on
the screen is taken. The verifier is a process of its own on this machine; drafter and window share the program that
is measured, and their processor time is told apart by thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from moa_bench.device_probe import peak_memory_mb
from moa_bench.link import get_profile
from moa_bench.link.proxy import background_link
from moa_bench.result import percentile_ms
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.window import Window
from moa_chat.local_verifier import local_verifier
from moa_runtime.errors import MoaError
from staged_window import staged_window, until
from typist import Painted, Typist

_QUESTION = "Write a Python function that returns the factorial of n, and explain it."


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with a sentence."""
    parser = argparse.ArgumentParser(description="Measure the window while an answer streams over a slow link.")
    parser.add_argument("--profile", default="lte", help="of moa-bench's links (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of the answer (default: %(default)s)")
    parser.add_argument("--bundle", default="", help="folder (default: the bundle in the cache)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--opening", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        if options.opening is not None:
            print(json.dumps(_opening(options.opening, options.bundle)))
            return 0
        result = {"opening": _opening_in_a_fresh_program(options.bundle), **_streaming(options)}
    except MoaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result) if options.json else _as_text(result))
    return 0


def _as_text(result: dict[str, Any]) -> str:
    return "\n".join(f"{group} {name}: {value}" for group, figures in result.items() for name, value in figures.items())


# -- opening -----------------------------------------------------------------------------------


def _opening_in_a_fresh_program(bundle: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--bundle", bundle, "--opening", repr(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MoaError(f"the window could not be opened: {done.stderr.strip().splitlines()[-1]}", code="window_failed")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _opening(began: float, bundle: str) -> dict[str, float]:
    """Seconds from the program's start to the first picture, and to a chat that waits for its verifier."""
    with staged_window(Settings(server="ws://127.0.0.1:9", bundle=bundle)) as window:
        painted = Painted(window)
        window.show()
        until(window, lambda: painted.once)
        shown = time.time() - began
        window.begin()
        until(window, window.page.composer.is_ready)
        return {"window_s": round(shown, 2), "chat_s": round(time.time() - began, 2)}


# -- streaming ---------------------------------------------------------------------------------


def _streaming(options: argparse.Namespace) -> dict[str, Any]:
    profile = get_profile(options.profile)
    with contextlib.ExitStack() as stack:
        verifier = stack.enter_context(local_verifier())
        port = int(verifier.endpoint.address.rsplit(":", 1)[1].split("/")[0])
        link = stack.enter_context(background_link(profile, "127.0.0.1", port))
        settings = Settings(
            server=f"ws://127.0.0.1:{link.port}",
            token=verifier.endpoint.token,
            bundle=options.bundle,
            max_new_tokens=options.tokens,
        )
        window = stack.enter_context(staged_window(settings))
        window.show()
        window.begin()
        until(window, window.page.composer.is_ready)
        return measure_answer(window, profile.name)


def measure_answer(window: Window, link: str) -> dict[str, Any]:
    """Ask, type meanwhile, and return the figures in groups; ``link`` is only named."""
    typist = Typist(window.page.composer.field)
    window.page.composer.put_back(_QUESTION)
    window.page.composer.send()
    own, whole, began = _own_seconds(window), time.process_time(), time.monotonic()
    typist.start()
    until(window, lambda: not window.chats.busy)
    seconds = time.monotonic() - began
    own, whole = _own_seconds(window) - own, time.process_time() - whole
    typist.stop()
    until(window, lambda: typist.settled)  # an answer may be shorter than a key press takes to be shown
    statistics = window.chats.statistics
    return {
        "answer": {
            "link": link,
            "tokens": statistics.tokens,
            "tokens_per_second": round(statistics.tokens_per_second, 1),
            "seconds": round(seconds, 1),
        },
        "echo": {
            "keys": len(typist.delays),
            "median_ms": percentile_ms(typist.delays, 50),
            "p95_ms": percentile_ms(typist.delays, 95),
            "worst_ms": percentile_ms(typist.delays, 100),
        },
        "processor": {
            "window_and_runtime_percent": round(100 * own / seconds, 1),
            "with_drafter_percent": round(100 * whole / seconds, 1),
        },
        "memory": {"peak_mb": round(peak_memory_mb(), 1)},
    }


def _own_seconds(window: Window) -> float:
    """Processor time of the window's thread and of the runtime's: everything but the drafter."""
    taken: list[float] = []
    window.runtime.run(_thread_time(), taken.append)
    until(window, lambda: bool(taken))
    return taken[0] + time.thread_time()


async def _thread_time() -> float:
    return time.thread_time()


if __name__ == "__main__":
    sys.exit(main())
