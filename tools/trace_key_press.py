"""Trace a key press to the first committed token of its answer: ``PYTHONPATH=tests python tools/trace_key_press.py``.

A window and a verifier of the tiny target run in this process. From the key press that sends a question until the
first committed token of its answer is shown, each product file in which a function is called is noted; importing and
starting are not. The engine is the default one of a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

ROOT = Path(__file__).resolve().parents[1]
_PRODUCT = tuple(f"{ROOT / folder}{os.sep}" for folder in ("runtime", "export", "server_stub", "apps"))
_WINDOW = "apps/moa_chat/"
_WARM_QUESTION, _QUESTION = "Name three colours.", "Why is the sky blue?"


class CallTrace:
    """Product files in which functions are called while :attr:`recording`, in all threads that start after it."""

    def __init__(self) -> None:
        self.recording = False
        self.calls: Counter[str] = Counter()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.recording and event == "call" and code.co_filename.startswith(_PRODUCT) and code.co_name != "<module>":
            self.calls[code.co_filename.removeprefix(f"{ROOT}{os.sep}")] += 1


def trace(folder: Path) -> Counter[str]:
    """Return the calls by file of one question, after another one has warmed everything up."""
    calls = CallTrace()
    from PySide6.QtCore import Qt
    from PySide6.QtTest import QTest

    from moa_chat.desktop.profile import Settings
    from moa_server.engine.load import load_local
    from moa_server.settings import Settings as ServerSettings
    from staged_window import staged_window, until
    from support.server.running import serving
    from support.tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_target

    target = make_tiny_target(folder / "target")
    drafter = make_tiny_drafter(target, folder / "drafter")
    bundle = make_tiny_bundle(folder / "bundle", target, drafter, "none", questions=())
    engine = load_local(str(target), drafter)
    with serving(engine, ServerSettings()) as verifier:
        settings = Settings(bundle=str(bundle), server=f"ws://127.0.0.1:{verifier.port}", max_new_tokens=24)
        with staged_window(settings) as window:
            window.show()
            window.begin()
            until(window, window.page.composer.is_ready)
            until(window, lambda: window.page.pill.accessibleDescription() in ("online", "slow"))
            for question in (_WARM_QUESTION, _QUESTION):
                QTest.keyClicks(window.page.composer.field, question)
                calls.recording = question == _QUESTION
                QTest.keyClick(window.page.composer.field, Qt.Key.Key_Return)
                until(window, lambda: any(span.committed for span in window.chats.messages[-1].spans))
                calls.recording = False
                until(window, lambda: not window.chats.busy)
    return calls.calls


def main() -> int:
    parser = argparse.ArgumentParser(description="Trace a key press to the first committed token of its answer.")
    parser.add_argument("--json", action="store_true", help="print calls by file as one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = trace(Path(folder))
    if options.json:
        print(json.dumps(dict(sorted(calls.items()))))
    else:
        print("\n".join(f"{count:6} {name}" for name, count in sorted(calls.items())))
        own = sum(name.startswith(_WINDOW) for name in calls)
        print(f"{len(calls) - own} files, and {own} of the window's own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
