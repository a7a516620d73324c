"""The device benchmark: its figures worked out by hand, its processes, and the command."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from moa_bench import device as device_module
from moa_bench.cli import main
from moa_bench.device import Device, energy_of, run_probe
from moa_bench.device_probe import RandomInputs, finished
from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, LinkStatus
from moa_runtime.manifest import read_manifest
from moa_server.settings import Settings
from support.bench.commands import Run
from support.refusals import refused
from support.server.running import serving


@pytest.fixture(scope="module")
def bundle(onnx_bundle, tmp_path_factory):
    """The tiny bundle with a second graph that nothing here runs."""
    folder = shutil.copytree(onnx_bundle, tmp_path_factory.mktemp("device") / "bundle")
    manifest = read_manifest(folder)
    entry = manifest.targets["onnx"]
    (folder / "graph").write_text("for an engine of another world")
    write_manifest(
        folder,
        dataclasses.replace(manifest, targets={"onnx": entry, "stranger": dataclasses.replace(entry, file="graph")}),
    )
    return Bundle.open(folder)


# -- steps ---------------------------------------------------------------------------------------


def test_steps_are_what_a_drafter_would_ask_for(tiny):
    *_, folder, backend, _ = tiny
    inputs = RandomInputs(read_manifest(folder), 24)
    for context, tokens in ((0, 1), (16, 8), (24, 1)):
        step = inputs.of(context, tokens)
        assert len(step.self_keys) == len(step.self_values) == context
        assert len(step.memory_keys) == len(step.memory_values) == max(context, 1)
        assert step.positions.tolist() == list(range(context, context + tokens))
        assert step.queries.tolist() == list(range(tokens))
        assert step.self_mask.sum(axis=1).tolist() == [context + n + 1 for n in range(tokens)]
        result = backend.step(step)
        assert result.top_tokens.shape == (tokens, backend.top_k)
        assert np.isfinite(result.top_logprobs).all()
    assert np.shares_memory(inputs.of(16, 1).self_keys, inputs.of(24, 8).self_keys)


def test_peak_memory_is_that_of_the_process_alone():
    code = """
import numpy as np
from moa_bench.device_probe import peak_memory_mb
before = peak_memory_mb()
np.ones(10_000_000)
print(before, peak_memory_mb())
"""
    ballast = np.ones(25_000_000)  # 200 MB here, which are not the other process's
    before, after = map(float, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert 5 < before < ballast.nbytes / 1e6
    assert 70 < after - before < 100


# -- answers -------------------------------------------------------------------------------------


def test_processor_time_per_token_is_over_all_answers():
    answers = [
        {"committed": 30, "drafted": 50, "cpu_s": 1.0, "wall_s": 2.0},
        {"committed": 10, "drafted": 30, "cpu_s": 0.6, "wall_s": 1.0},
    ]
    energy = energy_of(answers)
    assert (energy["cpu_s_per_committed_token"], energy["cpu_s_per_drafted_token"]) == (0.04, 0.02)
    assert (energy["answers"], energy["cpu_s"], energy["wall_s"]) == (2, 1.6, 3.0)
    assert energy_of([{**answers[0], "drafted": 0}])["cpu_s_per_drafted_token"] is None


def test_an_answer_that_lost_its_verifier_ends():
    async def events():
        yield LinkChanged(LinkStatus.ONLINE)
        yield LinkChanged(LinkStatus.OFFLINE, "the network is gone")

    with refused("connection_lost") as caught:
        asyncio.run(finished(events()))
    assert "the network is gone" in str(caught.value)


# -- the probe's process -------------------------------------------------------------------------

STEPS = {"target": "onnx", "threads": 1, "contexts": [0], "tokens": [1], "repeats": 1}


def test_a_graph_that_cannot_be_loaded_was_not_run(onnx_bundle, tmp_path):
    folder = shutil.copytree(onnx_bundle, tmp_path / "bundle")
    (folder / "device_half.onnx").write_text("no graph")
    write_manifest(folder, read_manifest(folder))
    (part,) = run_probe("steps", {**STEPS, "bundle": str(folder)})
    assert list(part) == ["not_run"] and "onnx" in part["not_run"]
    (part,) = run_probe("steps", {"nonsense": 1})  # the probe dies
    assert "TypeError" in part["not_run"] and "nonsense" in part["not_run"]


def test_a_probe_ends_when_its_reader_stops(bundle, monkeypatch):
    started = []
    popen = subprocess.Popen

    def remembered(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(device_module.subprocess, "Popen", remembered)
    parts = run_probe("steps", {**STEPS, "bundle": str(bundle.folder), "repeats": 1_000_000})
    assert "load_ms" in next(parts)
    parts.close()
    assert started[0].returncode is not None


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def command(bundle, capsys):
    """Runs ``moa-bench device`` on the tiny bundle."""

    def run(*more: str) -> Run:
        status = main(["device", "--bundle", str(bundle.folder), "--threads", "1", *more])
        return status, *capsys.readouterr()

    return run


def test_the_whole_benchmark(command, tiny, bundle):
    engine = tiny[-1]
    with serving(engine, Settings(token="secret")) as verifier:
        where = ["--server", verifier.url, "--token", verifier.token]
        answers = ["--limit", "2", "--max-new-tokens", "12", "--draft-length", "3"]
        status, out, _ = command("--contexts", "0,16", "--repeats", "2", *where, *answers, "--json")
    assert status == 0
    result = json.loads(out)
    assert not result["partial"]
    assert "stranger" in result["targets"]["stranger"]["not_run"]

    found = result["targets"]["onnx"]
    assert "not_run" not in found
    assert found["import_ms"] > 0 and found["load_ms"] > 0
    assert 0 < found["peak_memory_added_mb"] < found["peak_memory_mb"]
    assert [(step["context"], step["tokens"]) for step in found["steps"]] == [(0, 1), (0, 8), (16, 1), (16, 8)]
    for step in found["steps"]:
        assert 0 < step["ms"] <= step["p95_ms"]

    energy = found["energy"]
    assert energy["answers"] == 2
    assert 2 <= energy["committed"] <= 2 * 12
    assert energy["cpu_s"] > 0
    assert energy["cpu_s_per_committed_token"] == pytest.approx(energy["cpu_s"] / energy["committed"], rel=0.01)
    assert energy["cpu_s_per_drafted_token"] == pytest.approx(energy["cpu_s"] / energy["drafted"], rel=0.01)
    assert str(bundle.folder) not in out
    assert len(Device().tables(result)[1].rows) == 4


STEP = {"context": 0, "tokens": 1, "ms": 2.0, "p95_ms": 3.0}


@pytest.fixture
def requests(monkeypatch):
    """What probes were asked for; each is a stand-in that tells of one step or one answer."""
    asked = []

    def probe(work, request):
        asked.append(SimpleNamespace(work=work, **request))
        if request["target"] == "stranger":
            yield {"not_run": "it is strange"}
        elif work == "steps":
            yield {"import_ms": 1.0, "load_ms": 2.0}
            yield {"step": STEP}
        else:
            yield {"answer": {"committed": 4, "drafted": 6, "cpu_s": 0.2, "wall_s": 0.3}}
            yield {"not_run": "the verifier fell asleep"}

    monkeypatch.setattr(device_module, "run_probe", probe)
    return asked


def test_tables_and_a_plot(command, requests, tmp_path):
    plot = tmp_path / "device.svg"
    status, out, _ = command("--no-answers", "--plot", str(plot))
    assert status == 0 and "it is strange" in out
    (row,) = (line.split() for line in out.splitlines() if line.startswith("onnx") and "3.000" in line)
    assert row == ["onnx", "0", "1", "2.000", "3.000"]
    assert plot.read_text().startswith("<?xml")
    assert [asked.contexts for asked in requests] == [(0, 128)] * 2  # of 512 tokens, 8 are the step's own


@pytest.mark.parametrize(
    ("end", "status"), [(KeyboardInterrupt(), 130), (MoaError("it did not start", code="no_start"), 1)]
)
def test_without_a_verifier_the_steps_remain(command, requests, monkeypatch, end, status):
    def missing(*_, **__):
        raise end

    monkeypatch.setattr(device_module, "open_verifier", missing)
    ended, out, err = command("--json")
    found = json.loads(out)
    assert ended == status and found["partial"] and found["problem"] in err
    assert found["targets"]["onnx"]["steps"] == [STEP] and "energy" not in found["targets"]["onnx"]


def test_answers_that_end_early_count_as_far_as_they_came(command, requests, tiny):
    with serving(tiny[-1], Settings()) as verifier:
        status, out, _ = command("--server", verifier.url, "--json")
    energy = json.loads(out)["targets"]["onnx"]["energy"]
    assert (status, energy["answers"], energy["cpu_s_per_committed_token"]) == (0, 1, 0.05)
    assert energy["not_run"] == "the verifier fell asleep"
    assert [asked.target for asked in requests if asked.work == "answers"] == ["onnx"]
