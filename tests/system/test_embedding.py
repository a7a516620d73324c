"""The example program against a real verifier, through a link that is cut in the middle of its answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moa_bench.link import with_round_trip
from moa_bench.link.background import background_link
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from server.running import Verifier
from system.asking import QUESTION, TIMEOUT_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed_minimal.py"


def test_the_example_survives_a_cut(verifier: Verifier, onnx_bundle: Path, bundle) -> None:
    tokenizer = ChatTokenizer.from_bundle(bundle)
    own = verifier.decode(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]), 200, Sampling())
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        command = [sys.executable, str(EXAMPLE), str(onnx_bundle), f"ws://127.0.0.1:{link.port}", QUESTION]
        environment = {**os.environ, "MOA_TOKEN": verifier.token, "PYTHONUTF8": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                seen = process.stdout.read1()
                link.cut()
                while b"[offline]" not in (line := process.stderr.readline()):
                    assert line, "it did not notice"
                link.restore()
                rest, errors = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()  # else a test that fails would wait for it
    assert process.returncode == 0 and b"[online]" in errors
    assert (seen + rest).decode() == tokenizer.decode(own) + "\n"


def test_the_example_says_what_is_wrong(onnx_bundle: Path, unused_port: int) -> None:
    command = [sys.executable, str(EXAMPLE), str(onnx_bundle), f"ws://127.0.0.1:{unused_port}", QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no verifier answers")
