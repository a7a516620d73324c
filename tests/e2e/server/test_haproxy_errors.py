"""HAProxy's own errors have the form of a verifier's refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess

import httpx
import pytest

from support.server.edge_running import eventually
from support.system.haproxy_fleet import CONFIGURATION, find_haproxy


def listens(port: int) -> bool:
    with socket.socket() as connecting:
        return connecting.connect_ex(("127.0.0.1", port)) == 0


def test_without_a_verifier_a_request_is_told_to_try_again():
    program = find_haproxy()
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no haproxy here: apt-get install haproxy")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    where = {"MOA_LISTEN": f"127.0.0.1:{port}", "MOA_VERIFIER_1": "127.0.0.1:1", "MOA_VERIFIER_2": "127.0.0.1:1"}
    command = [program, "-db", "-q", "-f", str(CONFIGURATION)]
    with subprocess.Popen(command, env={**os.environ, **where}, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: listens(port))
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/decode", json={"tokens": [1]}, timeout=30)
        finally:
            process.kill()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"error": "no verifier is there; try again later"}


def test_every_error_of_its_own_is_an_object_with_a_sentence():
    lines = [line.split(" string ") for line in CONFIGURATION.read_text().splitlines() if "http-error" in line]
    assert {head.split()[2] for head, _ in lines} == {"500", "502", "503", "504"}
    for _, rest in lines:
        assert json.loads(rest.split("'")[1]).keys() == {"error"}
