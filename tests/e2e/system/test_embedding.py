"""The programs of the documents against a real verifier: the example, whose link is cut, and the README's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import background_link
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.offered_bundles import OfferedBundles
from moa_server.settings import Settings
from support.server.running import Verifier, serving
from support.system.asking import QUESTION, TIMEOUT_S

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "embed_minimal.py"


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
    assert done.stderr.startswith("error: ") and str(unused_port) in done.stderr


def test_the_program_of_the_readme_prints_the_answer(engine, onnx_bundle: Path, bundle, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    tokenizer = ChatTokenizer.from_bundle(bundle)
    question = re.findall(r'chat\.send\("(.*?)"', program)[0]
    offered = OfferedBundles.of([onnx_bundle], engine.fingerprints)
    with serving(engine, Settings(), bundles=offered) as verifier:
        program, replaced = re.subn(r"ws://[\w.:]+", f"ws://127.0.0.1:{verifier.port}", program)
        own = verifier.decode(tokenizer.encode_chat([{"role": "user", "content": question}]), 512, Sampling())
        environment = {**os.environ, "MOA_EDGE_CACHE": str(tmp_path), "PYTHONUTF8": "1"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    assert replaced == 1
    assert (done.returncode, done.stdout, done.stderr) == (0, tokenizer.decode(own), "")
