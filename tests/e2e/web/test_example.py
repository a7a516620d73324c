"""The example program against a real verifier, through a link that is cut in the middle of its answer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from moa_bench.link import LinkProfile
from moa_bench.link.proxy import background_link
from moa_export.targets.web import WebEngine
from moa_runtime.session.events import Sampling
from support.system.asking import QUESTION, TIMEOUT_S
from support.web.typescript import target_writes

#: Text comes no faster than it can be cut off.
SLOW = LinkProfile("slow", down_bits_per_s=40_000, up_bits_per_s=None, round_trip_ms=10)


def command(compiled: Path, bundle: Path, port: int) -> list[str]:
    return ["node", str(compiled / "example" / "embed.mjs"), str(bundle), f"ws://127.0.0.1:{port}", QUESTION]


def environment(engine: WebEngine, token: str = "") -> dict[str, str]:
    return {**os.environ, "MOA_TOKEN": token, "ORT": engine.module.with_name("ort.node.min.mjs").as_uri()}


def test_the_example_survives_a_cut(compiled, web_bundle, web_engine_here, verifier):
    own = target_writes(web_bundle, verifier, 200, Sampling())
    with background_link(SLOW, "127.0.0.1", verifier.port) as link:
        pipe, env = subprocess.PIPE, environment(web_engine_here, verifier.token)
        with subprocess.Popen(command(compiled, web_bundle, link.port), stdout=pipe, stderr=pipe, env=env) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                seen = process.stdout.read1()
                link.cut()
                lines = [process.stderr.readline()]
                while b"[offline]" not in lines[-1]:
                    assert lines[-1], f"it did not notice: {lines}"
                    lines.append(process.stderr.readline())
                link.restore()
                rest, errors = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()  # else a test that fails would wait for it
    assert process.returncode == 0 and b"[online]" in errors
    assert (seen + rest).decode() == own + "\n"


def test_the_example_says_what_is_wrong(compiled, web_bundle, web_engine_here, verifier, unused_port):
    for port, sentence in (
        (unused_port, "error: no verifier answers at ws://127.0.0.1:"),
        (verifier.port, f"error: the verifier at ws://127.0.0.1:{verifier.port}/v1/session refused the token"),
    ):
        done = subprocess.run(
            command(compiled, web_bundle, port),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(web_engine_here, "wrong"),
        )
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(sentence)
