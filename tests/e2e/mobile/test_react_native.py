"""``@moa-edge/react-native`` in Node: onnxruntime-node has the interface of onnxruntime-react-native."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from filelock import FileLock

from moa_bench.link import LinkProfile
from moa_bench.link.proxy import background_link
from moa_runtime.bundle import Bundle
from moa_runtime.session.events import Sampling
from support.server.running import Verifier
from support.system.asking import QUESTION, TIMEOUT_S, ask, chatting, endpoint

PACKAGE = Path(__file__).parents[3] / "apps" / "mobile" / "react-native"
_LENGTH = 60
_SAMPLING = Sampling(0.8, 0.95, 7)
#: Text comes no faster than it can be cut off.
_SLOW = LinkProfile("slow", down_bits_per_s=20_000, up_bits_per_s=None, round_trip_ms=10)


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder of the package, whose ``dist`` is made of the sources as they are."""
    if not (PACKAGE / "node_modules" / "onnxruntime-node").exists():
        missing = "the packages of apps/mobile/react-native are not installed: make test-e2e does that"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with FileLock(PACKAGE / "node_modules" / ".tests.lock"):
        done = subprocess.run(["npm", "run", "build", "--silent"], cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return PACKAGE


def lines_until(stream: IO[str], key: str, value: Any) -> list[dict[str, Any]]:
    """Return what the program says up to a line with this value."""
    said: list[dict[str, Any]] = []
    while not said or said[-1].get(key) != value:
        line = stream.readline()
        assert line, f"it ended after {said}"
        said.append(json.loads(line))
    return said


@pytest.mark.parametrize("graphs", ["onnx", "web"])
def test_a_chat_with_a_cut_in_the_middle_is_that_of_python(
    built: Path, verifier: Verifier, onnx_bundle: Path, web_bundle: Path, graphs: str
) -> None:
    bundle = {"onnx": onnx_bundle, "web": web_bundle}[graphs]

    async def in_python() -> str:
        async with chatting(Bundle.open(onnx_bundle), endpoint(verifier)) as chat:
            return (await ask(chat, count=_LENGTH, sampling=_SAMPLING)).text

    expected = asyncio.run(in_python())
    given = {"bundle": str(bundle), "graphs": graphs, "question": QUESTION, "length": _LENGTH, "token": verifier.token}
    given |= {"temperature": _SAMPLING.temperature, "seed": str(_SAMPLING.seed)}
    with background_link(_SLOW, "127.0.0.1", verifier.port) as link:
        given["url"] = f"ws://127.0.0.1:{link.port}"
        command = ["node", str(built / "dist" / "test" / "chat_program.mjs"), json.dumps(given)]
        env = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline()
                link.cut()
                lines_until(process.stdout, "status", "offline")
                link.restore()
                *_, finished = lines_until(process.stdout, "event", "AnswerFinished")
                rest, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()  # else a test that fails would wait for it
    assert process.returncode == 0
    assert finished["text"] == expected
    assert json.loads(rest) == {"stored": True}


def test_the_tests_of_chats_and_of_the_package_pass(built: Path) -> None:
    """The runtime's tests of chats with the code that Hermes gets, and the package's own."""
    tests = sorted(str(path) for path in (built / "dist" / "test").glob("*.test.mjs"))
    assert len(tests) >= 3
    command = ["node", "--test", "--test-reporter=spec", *tests]  # whose end repeats the tests that failed
    done = subprocess.run(command, cwd=built, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.slow
def test_the_sample_is_bundled_by_metro_and_compiled_for_hermes(built: Path, tmp_path: Path) -> None:
    sample, package = tmp_path / "sample", tmp_path / "package"
    shutil.copytree(PACKAGE / "sample", sample)
    shutil.copytree(built, package, ignore=shutil.ignore_patterns("node_modules", "sample"))
    for file, old, new in (
        ("package.json", '"file:.."', f'"file:{package}"'),
        ("metro.config.js", 'resolve(__dirname, "..")', json.dumps(str(package))),
    ):
        text = (sample / file).read_text()
        assert old in text
        (sample / file).write_text(text.replace(old, new))
    for command in (["npm", "install", "--ignore-scripts", "--silent"], ["npm", "run", "bundle", "--silent"]):
        done = subprocess.run(command, cwd=sample, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    bundle = sample / "dist" / "main.jsbundle"
    assert bundle.stat().st_size > 500_000
    system = {"linux": "linux64-bin", "darwin": "osx-bin", "win32": "win64-bin"}[sys.platform]
    hermes = sample / "node_modules" / "hermes-compiler" / "hermesc" / system / "hermesc"
    words = ["-w", "-O", "-emit-binary", "-out", str(tmp_path / "main.hbc"), str(bundle)]
    subprocess.run([str(hermes), *words], check=True, capture_output=True)
    assert (tmp_path / "main.hbc").stat().st_size > 500_000
