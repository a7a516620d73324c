"""Replicas of Ray Serve: their options, Ray's release, and how many there should be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moa_runtime import optional_deps as extras
from moa_server.replicas.autoscaling import QUEUE, QueuePolicy, stats_of
from moa_server.scheduling.step_cost import Load
from moa_server.settings import ServeError, options_of, require_ray, settings_of
from support.refusals import refused


def test_options_of_a_replica_are_those_of_moa_serve():
    args = {
        **{"model": "my-llama", "drafter": "run/drafter", "threads": 1, "max-sessions": 100, "keep-seconds": 60.5},
        **{"no-drafts": True, "insecure": False, "max-context": None, "token-file": "/etc/moa/tokens.json"},
        "allow-origin": ["https://a.example", "https://b.example"],
    }
    options = options_of(args)
    assert (options.model, options.drafter, options.threads) == ("my-llama", "run/drafter", 1)
    assert options.no_drafts and not options.insecure and options.max_context is None
    settings = settings_of(options)
    assert settings.max_sessions == 100 and settings.keep_seconds == 60.5 and not settings.loopback
    assert settings.token_file == Path("/etc/moa/tokens.json")
    assert settings.origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        ({"modle": "x"}, "bad_option", "--modle=x"),
        ({"threads": "two"}, "bad_option", "'two'"),
        ({"dtype": "int3"}, "bad_option", "'int3'"),
        ({"port": 1}, "not_for_replicas", "port"),
        ({"tls-cert": "c.pem"}, "not_for_replicas", "tls-cert"),
        ({"web": True}, "not_for_replicas", "web"),
    ],
)
def test_an_option_that_a_replica_cannot_have_is_refused(args, code, named):
    with refused(code, ServeError) as error:
        options_of(args)
    assert named in str(error.value)


def test_an_untested_release_of_ray_is_refused(monkeypatch):
    monkeypatch.setitem(extras.MODULES, "ray", ())
    monkeypatch.setattr("moa_server.settings.version", lambda name: "2.600.1")
    with refused("wrong_version") as error:
        require_ray("replicas")
    assert "2.600.1" in str(error.value)


LONGEST_S, SHORTEST_S = 0.4, 0.1


def wanted(waits: list[float] | None, running: int, target: int) -> int:
    """Number of replicas of the policy if replicas report these waits."""
    metrics = None if waits is None else {QUEUE: dict(enumerate(waits))}
    context: Any = SimpleNamespace(current_num_replicas=running, target_num_replicas=target, aggregated_metrics=metrics)
    count, state = QueuePolicy(longest_s=LONGEST_S, shortest_s=SHORTEST_S)(context)
    assert state == {}
    return count


@pytest.mark.parametrize(
    ("waits", "count"),
    [
        ([LONGEST_S], 1),
        ([LONGEST_S * 1.01], 2),
        ([LONGEST_S * 1.4, LONGEST_S * 1.4], 3),
        ([LONGEST_S * 100, LONGEST_S * 100], 4),  # twice as many at once, no more
        ([2 * LONGEST_S, 0.0], 2),  # the mean counts
        ([SHORTEST_S, SHORTEST_S], 2),
        ([0.0, SHORTEST_S], 1),
    ],
)
def test_replicas_follow_the_wait_of_work(waits, count):
    assert wanted(waits, len(waits), len(waits)) == count


@pytest.mark.parametrize(("waits", "running"), [([LONGEST_S], 1), ([], 1), ([1.0], 0), (None, 1)])
def test_the_number_stays_while_replicas_start_or_do_not_report(waits, running):
    assert wanted(waits, running, target=2) == 2


def test_an_idle_replica_reports_no_wait():
    load = Load()
    load.stepped(queue_s=3.0, step_s=0.1)
    assert stats_of(load.message(answers=1)) == {QUEUE: 3.0}
    assert stats_of(load.message(answers=0)) == {QUEUE: 0.0}
