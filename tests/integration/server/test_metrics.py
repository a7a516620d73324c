"""``/metrics``: what Prometheus is told, and that a real one takes it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, Job
from moa_server.scheduling.worker import Worker
from moa_server.settings import Settings
from support.server.running import TIMEOUT_S, Client, serving
from support.toy_engine import ToyEngine, plain

PROMPT, COUNT = [1, 2, 3], 12


def values(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels."""
    families = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def some_rounds(verifier, engine) -> None:
    """An answer drafted in fours, each draft right, without memory rows, which may take steps of their own."""
    right = [*PROMPT, *plain(engine, PROMPT, COUNT)]
    client = Client(verifier, engine, row_encoding=wire.ROW_ENCODING_UNSPECIFIED)
    client.connect()
    client.session.prompt(PROMPT, Sampling(), COUNT)
    client.rounds(lambda tokens: right[len(tokens) : len(tokens) + 4])
    assert client.session.committed == right
    client.socket.close()


def test_what_a_session_counts():
    engine = ToyEngine()
    with serving(engine, Settings(max_sessions=1)) as verifier:
        some_rounds(verifier, engine)
        assert verifier.http("POST", "/v1/decode", content=b"no json").status_code == 400
        found = values(verifier.http("GET", "/metrics").text)
    # The prompt's own token, then rounds of 4 drafted tokens and the target's own, and what was left for the last one.
    assert found["moa_tokens_total", "committed"] == COUNT
    assert found["moa_round_tokens_sum",] == COUNT - 1
    assert found["moa_round_tokens_count",] == found["moa_rounds_total",] == 3
    assert found["moa_tokens_total", "accepted"] == found["moa_tokens_total", "verified"] >= 8
    assert found["moa_tokens_total", "prefill"] >= len(PROMPT)
    assert found["moa_forwards_total",] == 4
    # The prompt's memory rows may come in a step of their own, or in that of the first draft.
    assert found["moa_steps_total",] == found["moa_step_seconds_count",] == found["moa_queue_seconds_count",]
    assert found["moa_steps_total",] in (4, 5)
    assert found["moa_step_sequences_bucket", "1.0"] == found["moa_steps_total",]
    assert found["moa_sessions",] == 1
    assert found["moa_refusals_total", "http_400"] == 1
    assert found["moa_jobs_dropped_total", "left"] == 0
    assert found["moa_connections",] >= 1 and found["moa_connections_limit",] > 1
    assert 0 < found["moa_cache_tokens",] <= found["moa_cache_limit_tokens",]


def test_dropped_jobs_are_counted():
    class Gated(ToyEngine):
        entered, gate = asyncio.Event(), asyncio.Event()

        async def step(self, requests):
            self.entered.set()
            await self.gate.wait()
            return await super().step(requests)

    async def run() -> dict[tuple[str, ...], float]:
        engine, metrics = Gated(), Metrics()
        worker = Worker(engine, metrics)
        engine.broken.add(4)
        jobs = [Job(sequence, [1], Sampling()) for sequence in range(1, 5)]
        running = [asyncio.create_task(worker.run(job, 10)) for job in jobs[:1]]
        await engine.entered.wait()
        running += [asyncio.create_task(worker.run(job, 0 if job is jobs[2] else 10)) for job in jobs[1:]]
        await asyncio.sleep(0)  # they wait for the next step
        running[1].cancel()
        engine.gate.set()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        expected = [type(None), asyncio.CancelledError, ExpiredError, EngineFailedError]
        assert [type(outcome) for outcome in outcomes] == expected
        await worker.close()
        return values(metrics.text().decode())

    found = asyncio.run(run())
    assert [found["moa_jobs_dropped_total", reason] for reason in ("left", "expired", "failed")] == [1, 1, 1]


@pytest.mark.slow
def test_prometheus_takes_the_metrics(transformers_engine):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    with serving(transformers_engine, Settings(token="a-secret")) as verifier:
        client = Client(verifier, transformers_engine)
        client.connect()
        client.session.prompt([5, 6, 7], Sampling(), 20)
        client.rounds(lambda tokens: [9, 9])
        client.socket.close()
        text = verifier.http("GET", "/metrics").text
    check = {"input": text, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    checked = subprocess.run([promtool, "check", "metrics"], **check)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert (types["moa_tokens_total"], types["moa_step_seconds"]) == ("counter", "histogram")
