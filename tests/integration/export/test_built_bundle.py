"""Bundles that are built without torch: the bytes of an export, its proof, and a chat in a Python without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from filelock import FileLock

from moa_chat.local_verifier import ensure_bundle
from moa_drafter.target_source import resolve_target
from moa_export import build_program, plain_bundle, progress
from moa_export.built_bundle import PROOF_FILE, build_bundle, proof_of
from moa_export.pipeline import ExportSettings, export_bundle
from moa_export.progress import JsonProgress, Progress
from moa_runtime.bundle import Bundle
from moa_runtime.bundle_download import Offer, fetch_bundle
from moa_runtime.manifest import Fingerprints, Manifest
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.transport import Endpoint
from support.refusals import refused

#: Found first on the path, it makes imports of these packages fail in every process.
_BLOCKS = (
    "import sys\n"
    "for name in ('torch', 'transformers', 'gguf', 'accelerate', 'tqdm', 'yaml'):\n"
    "    sys.modules[name] = None\n"
)


def built(out: Path, drafter: Path, target: Path, targets: tuple[str, ...] = ("onnx",)) -> Manifest:
    return build_bundle(out, Progress(io.StringIO(), quiet=True), targets, drafter, model=str(target))


def test_an_export_makes_the_same_bytes(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    targets = ("onnx", "web")
    settings = ExportSettings(targets, tiny_drafter, model=str(tiny_target), checked=False)
    export_bundle(tmp_path / "exported", settings, Progress(io.StringIO(), quiet=True))
    exported = Bundle.open(tmp_path / "exported").manifest
    ours = built(tmp_path / "built", tiny_drafter, tiny_target, targets)
    assert set(ours.files) > {"device_half.onnx", "device_half.web.onnx", "writer.onnx", "writer.web.onnx"}
    tools = dict(tools={}, files={})
    assert ours.files == exported.files
    assert dataclasses.replace(ours, **tools) == dataclasses.replace(exported, **tools)


def test_no_product_takes_a_cache_that_may_be_empty(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    """In onnxruntime before 1.32 such a product ends the process: it divides by its size."""
    built(tmp_path / "built", tiny_drafter, tiny_target)
    graph = onnx.load(tmp_path / "built" / "device_half.onnx").graph
    caches = {"self_keys", "self_values"}
    for node in graph.node:  # sorted: what reads comes after what is read
        if node.op_type == "Split" and caches & {*node.input}:
            caches |= {*node.output}
    assert {node.op_type for node in graph.node if caches & {*node.input}} <= {"Concat", "Split", "Shape"}


def test_what_was_proven_is_said_of_the_same_bytes_alone(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    drafter = shutil.copytree(tiny_drafter, tmp_path / "drafter")
    plain = built(tmp_path / "plain", drafter, tiny_target)
    assert plain.manners is None and plain.targets["onnx"].checks["tau"]["status"] == "not run"
    checked = dataclasses.replace(plain.targets["onnx"], checks={"tau": {"status": "passed", "loss": 0.01}})
    proven = dataclasses.replace(plain, targets={"onnx": checked}, writer=None, manners=StoppingRule(0.25, 9, 3))
    proof = proof_of(proven)
    (drafter / PROOF_FILE).write_text(json.dumps(proof))
    found = built(tmp_path / "same", drafter, tiny_target)
    assert found.targets == proven.targets and found.manners == proven.manners and found.files == plain.files
    assert found.writer.checks["perplexity"]["status"] == "not run"
    assert Bundle.open(tmp_path / "same").manifest == found
    proof["graphs"]["device_half.onnx"]["sha256"] = "0" * 64
    (drafter / PROOF_FILE).write_text(json.dumps(proof))
    assert built(tmp_path / "other", drafter, tiny_target) == plain


@pytest.mark.parametrize("plain", [False, True])
def test_a_program_waits_for_another_that_makes_the_bundle(tiny_target, tmp_path, monkeypatch, plain: bool) -> None:
    """It then uses what was made, and makes nothing."""
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    model = str(tiny_target)
    out = plain_bundle.cached_plain_bundle(model) if plain else tmp_path / "bundles" / "default"
    (tmp_path / "bundles").mkdir(exist_ok=True)
    made, other = tmp_path / "made", FileLock(f"{out}.lock")
    if plain:
        out.rename(made)
    else:
        made.mkdir()
        (made / "manifest.json").touch()
    waited: list[str] = []

    class OtherEnds(Progress):
        @contextlib.contextmanager
        def stage(self, title: str, steps: int = 1) -> Iterator[Callable[[], None]]:
            waited.append(title)
            made.rename(out)
            other.release()
            yield lambda: None

    def again(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(plain_bundle if plain else build_program, "Progress", OtherEnds, raising=False)
    monkeypatch.setattr("moa_export.built_bundle.build_bundle", again)
    monkeypatch.setattr(plain_bundle, "make_plain_bundle", again)
    with other:
        if plain:
            assert plain_bundle.cached_plain_bundle(model) == out
        else:
            assert build_program.main([str(out)]) == 0
    assert len(waited) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder of other systems lies elsewhere")
@pytest.mark.parametrize("wanted", ["bundle", "fetched", "target"])
def test_a_home_that_cannot_be_used_is_refused_with_a_way_out(tmp_path, monkeypatch, capsys, wanted) -> None:
    (home := tmp_path / "home").touch()
    for name in ("MOA_EDGE_CACHE", "MOA_EDGE_BUNDLE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    offer = Offer("0" * 64, Fingerprints("", "", ""), "", "moa", ("onnx",), 1)
    work: dict[str, Callable[[], object]] = {
        "bundle": ensure_bundle,
        "fetched": lambda: fetch_bundle(Endpoint("ws://127.0.0.1:9"), offer),
        "target": resolve_target,
    }
    with refused("cache_refused") as caught:
        work[wanted]()
    assert all(each in str(caught.value) for each in (str(home), "MOA_EDGE_CACHE")) and not capsys.readouterr().err


def test_the_time_that_is_left_waits_for_the_pace_of_a_download(monkeypatch) -> None:
    now, out = [100.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with JsonProgress(out, plan={"fetch": 5.0, "read": 1.0}).stage("fetch", 10) as advance:
        for now[0] in (102.0, 103.0, 106.0):  # of one that begins late
            advance()
    assert [json.loads(line)["left_s"] for line in out.getvalue().splitlines()] == [0, 0, 0, pytest.approx(10.3)]


def test_a_chat_on_this_machine_needs_no_torch(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BLOCKS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "MOA_EDGE_CACHE": str(tmp_path / "cache")}
    code = (
        "import sys; from pathlib import Path; from moa_chat import cli; from moa_export.progress import Progress\n"
        "from moa_export.built_bundle import build_bundle, usual_seconds\n"
        "bundle, drafter, target = sys.argv[1:]\n"
        "progress = Progress(sys.stderr, plan=usual_seconds(['onnx']))\n"
        "build_bundle(Path(bundle), progress, ('onnx',), drafter, model=target)\n"
        "words = ['--local', '--once', 'Name three colours.', '--json', '--max-new-tokens', '8', '--threads', '1']\n"
        "sys.exit(cli.main([*words, '--bundle', bundle, '--model', target, '--drafter', drafter]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bundle"), f"{tiny_drafter}/", str(tiny_target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["statistics"]["tokens"] > 0
    assert "moa-export: 5/5 writing the bundle" in done.stderr


@pytest.mark.slow
def test_the_proof_beside_the_shipped_weights_is_of_what_is_built_today(tmp_path: Path) -> None:
    manifest = build_bundle(tmp_path / "bundle", Progress(sys.stderr))
    checks = {**manifest.targets["onnx"].checks, **manifest.writer.checks}
    assert {name: check["status"] for name, check in checks.items()} == dict.fromkeys(
        ("parity", "tau", "perplexity"), "passed"
    )
