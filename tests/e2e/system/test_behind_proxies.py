"""Two replicas behind HAProxy and behind Ray Serve: what sticks, and what is left when one drains and one dies."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from websockets.exceptions import ConnectionClosed

from moa_bench import verifier as bench
from moa_bench.questions import BUILTIN_QUESTIONS
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, LinkChanged, LinkStatus
from moa_runtime.options import LoopSettings
from moa_runtime.session.events import Sampling, Welcomed
from moa_runtime.transport import SESSION_ID_HEADER, Timing, new_session_id
from moa_server.connection import GOING_AWAY
from moa_server.replicas.autoscaling import QueuePolicy
from moa_server.settings import ServeError, options_of
from support.refusals import refused
from support.server.running import Client, Verifier
from support.system.asking import ids
from support.system.haproxy_fleet import CONFIGURATION, behind_haproxy, find_haproxy
from support.system.replica_fleet import Fleet, wait_for

pytestmark = pytest.mark.slow

_SESSIONS = 12
_ANSWER_TOKENS = 48
_PATIENCE_S = 60.0  # all share this machine's processors: a late answer to a ping is no outage
_CONVERSATIONS = 16
_NO_RAY = 'no Ray here: pip install "moa-edge[ray]"'


def need(found: object, missing: str) -> None:
    """Skip where something is missing; in CI there has to be everything."""
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)


@pytest.fixture(scope="module", params=["haproxy", "ray"])
def proxy(request: pytest.FixtureRequest) -> str:
    if request.param == "haproxy":
        need(find_haproxy(), "no haproxy here: apt-get install haproxy")
    else:
        need(importlib.util.find_spec("ray"), _NO_RAY)
    return str(request.param)


@contextlib.contextmanager
def fleet_behind(proxy: str, options: dict[str, object]) -> Iterator[Fleet]:
    if proxy == "haproxy":
        with behind_haproxy(options) as fleet:
            yield fleet
        return
    from support.system.ray_fleet import behind_ray

    with behind_ray(options) as fleet:
        yield fleet


@pytest.fixture
def options(tiny_target: Path, tiny_drafter: Path) -> dict[str, object]:
    return {"model": tiny_target, "drafter": tiny_drafter, "threads": 1}


@dataclass
class Session:
    """A chat that asks one question after the other, each in a new conversation; every second session samples.

    Attributes:
        answers: prompt, sampling and tokens of each.
        resumed: number of those whose connection was lost and that continued.
    """

    number: int
    chat: Chat
    answers: list[tuple[tuple[int, ...], Sampling, tuple[int, ...]]] = field(default_factory=list)
    resumed: int = 0

    async def ask(self) -> None:
        chat, count = self.chat, len(self.answers)
        question = BUILTIN_QUESTIONS[(self.number + count) % len(BUILTIN_QUESTIONS)].turns[0]
        sampling = Sampling(0.8, 0.95, 1000 * self.number + count) if self.number % 2 else Sampling()
        chat.restore([])
        events = [event async for event in chat.send(question, max_new_tokens=_ANSWER_TOKENS, sampling=sampling)]
        assert isinstance(events[-1], AnswerFinished)
        self.resumed += any(isinstance(each, LinkChanged) and each.status is not LinkStatus.ONLINE for each in events)
        self.answers.append((tuple(chat.tokens[: chat.prompt_tokens]), sampling, tuple(ids(events[-1]))))

    async def ask_until(self, enough: asyncio.Event) -> None:
        """Ask without a pause, and once more after that."""
        while not enough.is_set():
            await self.ask()
        await self.ask()


async def talk_through(sessions: list[Session], fleet: Fleet) -> None:
    """Let all sessions ask while one replica drains and, after it is replaced, the other one is killed."""
    for session in sessions:  # one after the other: a chat that waits too long reports an outage
        await session.chat.open()
    await asyncio.gather(*(session.ask() for session in sessions))
    for end in (fleet.drain, fleet.kill):
        before, enough = sum(session.resumed for session in sessions), asyncio.Event()
        asking = [asyncio.create_task(session.ask_until(enough)) for session in sessions]
        await asyncio.to_thread(end)
        await asyncio.to_thread(fleet.replace)
        enough.set()
        await asyncio.gather(*asking)
        assert sum(session.resumed for session in sessions) > before
    await asyncio.gather(*(session.chat.close() for session in sessions))


def test_nothing_is_lost_when_one_drains_and_one_dies(proxy, options, onnx_bundle):
    """The verifier drafts, half of the chats sample, and every text equals the target's plain decoding."""
    settings = LoopSettings(drafting="server", offline="off")
    timing = Timing(open_timeout=_PATIENCE_S, ping_timeout=_PATIENCE_S)
    bundle = Bundle.open(onnx_bundle)
    with fleet_behind(proxy, {**options, "max-sessions": 2 * _SESSIONS}) as fleet:

        async def talk() -> list[Session]:
            made: dict[str, Any] = {"drafter": None, "settings": settings, "timing": timing}
            sessions = [Session(number, Chat(bundle, fleet.endpoint, **made)) for number in range(_SESSIONS)]
            await talk_through(sessions, fleet)
            return sessions

        answers = [answer for session in asyncio.run(talk()) for answer in session.answers]
        assert len(answers) >= 5 * _SESSIONS
        target, asked = bench.Verifier(fleet.endpoint), list(dict.fromkeys(answer[:2] for answer in answers))
        with ThreadPoolExecutor(8) as decoders:
            own = decoders.map(lambda each: tuple(target.decode(each[0], _ANSWER_TOKENS, each[1])), asked)
            expected = dict(zip(asked, own, strict=True))
        assert [answer for answer in answers if answer[2] != expected[answer[:2]]] == []


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


def conversations(fleet: Fleet, onnx_bundle: Path) -> list[Client]:
    """Clients with an id each, half of which say it in the query."""
    manifest = Bundle.open(onnx_bundle).manifest
    engine: Any = SimpleNamespace(fingerprints=manifest.fingerprints, stop_tokens=manifest.stop_tokens)
    server: Any = None
    port = urlsplit(fleet.endpoint.address).port or 0
    clients = []
    for number in range(_CONVERSATIONS):
        proxy = Behind(server, port, fleet.endpoint.token, session_id=new_session_id(), in_query=number % 2 == 1)
        clients.append(Client(proxy, engine))
        clients[-1].connect()
    return clients


def test_a_conversation_finds_its_verifier_and_is_told_when_that_drains(proxy, options, onnx_bundle):
    """By the header and by the query alike. Who is cut is told to go elsewhere, and all others stay."""
    with fleet_behind(proxy, options) as fleet:
        clients = conversations(fleet, onnx_bundle)
        for _ in range(2):
            for client in clients:
                client.drop()
                client.verifier.in_query = not client.verifier.in_query  # type: ignore[attr-defined]
                client.connect()
        welcomes = [[event.resumed for event in client.events if isinstance(event, Welcomed)] for client in clients]
        assert welcomes == [[False, True, True]] * _CONVERSATIONS
        fleet.drain()
        codes = [closed_with(client) for client in clients]
        assert set(codes) == {None, GOING_AWAY}


def closed_with(client: Client) -> int | None:
    """The code that the connection was closed with; None where it stands."""
    try:
        client.socket.recv(0)
    except TimeoutError:
        client.drop()
        return None
    except ConnectionClosed as closed:
        return closed.rcvd and closed.rcvd.code
    raise AssertionError("a frame that was not requested")


def test_ray_runs_more_replicas_while_work_waits(options):
    need(importlib.util.find_spec("ray"), _NO_RAY)
    from support.system.ray_fleet import behind_ray

    waits = {"longest_s": 1e-6, "shortest_s": 0.0}  # whatever work there is has waited for too long
    policy = {"policy_function": "moa_server.replicas.autoscaling:QueuePolicy", "policy_kwargs": waits}
    delays = {"upscale_delay_s": 0.0, "metrics_interval_s": 0.5, "look_back_period_s": 2.0}
    autoscaling = {"min_replicas": 1, "max_replicas": 2, "policy": policy, **delays}
    with behind_ray(options, replicas=None, deployment={"autoscaling_config": autoscaling}) as fleet:
        assert fleet.states() == {"RUNNING": 1}
        enough, target = threading.Event(), bench.Verifier(fleet.endpoint)

        def ask() -> None:
            while not enough.is_set():
                target.decode([7, 8, 9], 100)

        with ThreadPoolExecutor(2) as users:
            asking = [users.submit(ask) for _ in range(2)]
            try:
                wait_for("Ray had one replica", lambda: fleet.states() == {"RUNNING": 2})
            finally:
                enough.set()
            for each in asking:
                each.result()


def test_replicas_that_anybody_could_use_are_refused(monkeypatch):
    need(importlib.util.find_spec("ray"), _NO_RAY)
    from moa_server.replicas.ray_app import build

    monkeypatch.delenv("MOA_TOKEN", raising=False)
    with refused("token_missing", ServeError):
        build({"threads": 1})
    assert build({"insecure": True}) is not None


def test_the_shipped_configuration_is_one_of_rays():
    need(importlib.util.find_spec("ray"), _NO_RAY)
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(CONFIGURATION.with_name("ray.yaml").read_text())
    [application] = ServeDeploySchema.model_validate(content).applications
    assert options_of(application.args).max_sessions == 64
    [deployment] = application.deployments
    module, _, name = deployment.autoscaling_config["policy"]["policy_function"].partition(":")
    assert getattr(importlib.import_module(module), name) is QueuePolicy
