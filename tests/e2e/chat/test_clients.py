"""Clients as they are published, against ``moa-chat --serve``: text, an object, a call of a tool, an answer to its
result. Each is a script in ``clients``, which prints what it got."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("granian")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

from support.chat.programs import Running, gateway, verifier
from support.sentences import REPOSITORY

CLIENTS = Path(__file__).parent / "clients"
PYTHON = REPOSITORY / ".venv-clients/bin/python"
TIMEOUT_S = 120
COLOURS = [{"colour": "red"}, {"colour": "blue"}]


@pytest.fixture(scope="module")
def endpoint(onnx_bundle: Path, tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    with verifier(tiny_target, tiny_drafter) as server, gateway(onnx_bundle, server.url) as running:
        yield running


def got(interpreter: str | Path, script: str, endpoint: Running) -> dict:
    """What a client got. It has no other address, and no key."""
    command = [str(interpreter), str(CLIENTS / script), endpoint.url]
    environment = {name: text for name, text in os.environ.items() if not name.endswith("_API_KEY")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reference(endpoint) -> dict:
    return got(sys.executable, "openai_client.py", endpoint)


def test_the_python_package_gets_text_objects_and_calls(reference):
    assert reference["plain"] == reference["stream"] != "" and reference["object"] in COLOURS
    assert reference["call"] == reference["streamed_call"] and reference["call"][1] in COLOURS
    assert reference["call"][0] == "paint" and reference["reason"] == "tool_calls" and reference["final"]


def check(found: dict, reference: dict) -> None:
    """A client got what the reference did; the answer to a result may be to another wording of the call."""
    assert found.pop("final")
    assert found == {name: reference[name] for name in found}


@pytest.mark.parametrize("script", ["openai_client.mjs", "ai_client.mjs"])
def test_clients_for_node_get_the_same(endpoint, reference, script):
    if not (CLIENTS / "node_modules/.installed").exists() and not os.environ.get("CI"):
        pytest.skip("`make clients` installs the clients for Node")
    check(got(shutil.which("node") or "node", script, endpoint), reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai", "langchain", "litellm", "pydantic_ai", "llm"])
def test_clients_in_an_environment_of_their_own_get_the_same(endpoint, reference, name):
    if not PYTHON.exists():
        pytest.skip("`make clients-slow` installs the other clients")
    check(got(PYTHON, f"{name}_client.py", endpoint), reference)
