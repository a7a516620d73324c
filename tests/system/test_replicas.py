"""Two replicas behind HAProxy and behind Ray Serve: what sticks, and what is left when one dies and one drains."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moa_bench.cli import main
from moa_bench.replicas import PROXIES
from moa_bench.replicas.behind_haproxy import behind_haproxy, find_haproxy
from moa_bench.replicas.fleet import Fleet
from moa_runtime.bundle import Bundle
from moa_runtime.session.events import Welcomed
from moa_runtime.session_id import SESSION_ID_HEADER, new_session_id
from server.running import Client, Verifier

pytestmark = pytest.mark.slow

_SESSIONS = 12


def need(found: object, missing: str) -> None:
    """Skip where something is missing; in CI there has to be everything."""
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    if request.param == "haproxy":
        need(find_haproxy(), "no haproxy here: apt-get install haproxy")
    else:
        need(importlib.util.find_spec("ray"), 'no Ray here: pip install "moa-edge[ray]"')
    return str(request.param)


@contextlib.contextmanager
def fleet_behind(proxy: str, options: dict[str, object], **more: Any) -> Iterator[Fleet]:
    if proxy == "haproxy":
        with behind_haproxy(options) as fleet:
            yield fleet
        return
    from moa_bench.replicas.behind_ray import behind_ray

    with behind_ray(options, **more) as fleet:
        yield fleet


@pytest.fixture
def options(tiny_target: Path, tiny_drafter: Path) -> dict[str, object]:
    return {"model": tiny_target, "drafter": tiny_drafter, "threads": 1}


def test_nothing_is_lost_when_one_dies_and_one_drains(proxy, tiny_target, tiny_drafter, onnx_bundle, capsys):
    """What ``moa-bench replicas`` shows with more sessions."""
    words = ["--bundle", str(onnx_bundle), "--model", str(tiny_target), "--drafter", str(tiny_drafter)]
    status = main(["replicas", "--behind", proxy, "--sessions", str(_SESSIONS), "--json", *words])
    said = capsys.readouterr()
    assert status == 0, said.err
    result = json.loads(said.out)
    assert result["compared"] == result["answers"] >= 6 * _SESSIONS and result["different"] == 0
    assert [event["event"] for event in result["events"]] == ["killed", "drained"]
    assert all(0 < event["resumes"] <= 2 * _SESSIONS for event in result["events"])
    assert result["other_resumes"] == 0


@dataclass
class Behind(Verifier):
    """What stands before the replicas, as one client addresses it: with the id in the header, or in the query."""

    session_id: str = ""
    in_query: bool = False

    @property
    def url(self) -> str:
        return f"{super().url}?{SESSION_ID_HEADER}={self.session_id}" if self.in_query else super().url

    @property
    def headers(self) -> dict[str, str]:
        return super().headers if self.in_query else {**super().headers, SESSION_ID_HEADER: self.session_id}


def test_all_connections_of_a_conversation_find_it(proxy, options, onnx_bundle):
    """By the header and by the query alike."""
    manifest = Bundle.open(onnx_bundle).manifest
    engine: Any = type("Engine", (), {"fingerprints": manifest.fingerprints, "stop_tokens": manifest.stop_tokens})
    with fleet_behind(proxy, options) as fleet:
        port, token = int(fleet.endpoint.address.split(":")[2].split("/")[0]), fleet.endpoint.token
        clients = [
            Client(Behind(None, port, token, session_id=new_session_id(), in_query=bool(number % 2)), engine)  # type: ignore[arg-type]
            for number in range(16)
        ]
        for client in clients:
            client.connect()
        for _ in range(2):
            for client in clients:
                client.drop()
                client.verifier.in_query = not client.verifier.in_query  # type: ignore[attr-defined]
                client.connect()
        welcomes = [[event.resumed for event in client.events if isinstance(event, Welcomed)] for client in clients]
        assert welcomes == [[False, True, True]] * len(clients)
        for client in clients:
            client.drop()
