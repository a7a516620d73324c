"""HAProxy's own errors have the form of a verifier's refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from support.server.edge_running import eventually
from support.system.haproxy_fleet import CONFIGURATION, find_haproxy

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of HAProxy with the shipped configuration, whose verifiers are not there."""
    program = find_haproxy()
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no haproxy here: apt-get install haproxy")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = listening.getsockname()[1]
    where = {"MOA_LISTEN": f"127.0.0.1:{free}", "MOA_VERIFIER_1": NOBODY, "MOA_VERIFIER_2": NOBODY}
    command = [program, "-db", "-q", "-f", str(CONFIGURATION)]
    with subprocess.Popen(command, env={**os.environ, **where}, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: _listens(free))
            yield free
        finally:
            process.kill()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        time.sleep(0.05)
        return False
    return True


def test_no_verifier_is_there(port):
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/decode", json={"tokens": [1]}, timeout=30)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"error": "no verifier is there; try again later"}


def test_every_error_of_its_own_is_an_object_with_a_sentence():
    lines = [line.split(" string ") for line in CONFIGURATION.read_text().splitlines() if "http-error" in line]
    assert {head.split()[2] for head, _ in lines} == {"500", "502", "503", "504"}
    for _, rest in lines:
        assert json.loads(rest.split("'")[1]).keys() == {"error"}
