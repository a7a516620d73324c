"""Targets and drafters of a Hub that stands in on loopback: only what is needed is fetched, and fetching goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file

from support.drafter.eagle3_heads import write_head
from support.hub import standing_in
from support.server.running import moa_serve

pytest.importorskip("huggingface_hub")
#: The library keeps what it received in pieces of this size.
PIECE = 1 << 16
BEGIN = f"import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = {PIECE}\n"
BEGIN += "import moa_drafter.hub_download as h; h.LARGE_BYTES = 1 << 10\n"
Program = Callable[..., subprocess.CompletedProcess]


def environment(folder: Path, url: str) -> dict[str, str]:
    """Return the environment of a program with a Hub of its own and caches in ``folder``."""
    own = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "MOA_EDGE_CACHE": str(folder / "cache")}
    return {**os.environ, **own, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run Python with a Hub of one's own and empty caches."""

    def run(url: str, code: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", BEGIN + code]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(tmp_path, url))

    return run


def in_shards(folder: Path, place: Path) -> Path:
    """Copy a target's folder with its tensors in two files, and the same once more for other programs."""

    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").rename(place / "consolidated.safetensors")
    names, count = sorted(tensors), len(tensors) // 2
    shards = {"model-00001-of-00002.safetensors": names[:count], "model-00002-of-00002.safetensors": names[count:]}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, place / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "original").mkdir()
    shutil.copy(place / "consolidated.safetensors", place / "original" / "model.safetensors")
    return place


def test_a_fetch_that_was_interrupted_goes_on_and_the_target_is_chatted_with(tiny_target, tmp_path, program) -> None:
    second = "model-00002-of-00002.safetensors"
    chat = "from moa_chat.cli import main; import sys\n"
    chat += (
        "sys.exit(main(['--once', 'Name three colours.', '--local', '--model', 'some/model', '--max-new-tokens', '8']))"
    )
    size = in_shards(tiny_target, tmp_path / "model").joinpath(second).stat().st_size
    assert size > 3 * PIECE
    with standing_in({"some/model": tmp_path / "model"}, {second: [PIECE + 100] + [0] * 5}) as hub:
        broken = program(hub.url, chat)
        assert broken.returncode == 2 and broken.stderr.rstrip().endswith("[hub_failed]"), broken.stderr
        assert hub.asked[-6:] == [(second, 0), *[(second, PIECE)] * 5]
        hub.asked.clear()
        hub.cuts[second] = [PIECE + 5]
        done = program(hub.url, chat)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        assert hub.asked == [(second, PIECE), (second, 2 * PIECE)]
        hub.asked.clear()
        assert program(hub.url, chat).stdout == done.stdout and hub.asked == []
    assert program("http://127.0.0.1:9", chat).stdout == done.stdout  # without the Hub


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "its terms"),
        (401, "RepoNotFound", "the Hub has no some/model"),
        (400, "", "answered with status 400"),
    ],
)
def test_a_refusal_of_the_hub_names_its_cause(status, code, said, program) -> None:
    with standing_in({}, refusal=(status, code)) as hub:
        done = program(hub.url, "from moa_drafter.target_source import resolve_target\nresolve_target('some/model')")
    assert said in done.stderr.splitlines()[-1]


def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(tiny_target, program) -> None:
    code = "import sys; from moa_server.cli import main\n"
    code += "sys.exit(main(['--model', 'some/model', '--memory', '0.0001']))"
    with standing_in({"some/model": tiny_target}) as hub:
        done = program(hub.url, code)
        assert done.returncode == 2 and done.stderr.rstrip().endswith("[too_large]"), done.stderr
        assert "config.json" in dict(hub.asked) and "model.safetensors" not in dict(hub.asked)


def test_what_nothing_computes_is_refused_before_its_weights_are_fetched(tiny_target, tmp_path, program) -> None:
    changes, models = [{"model_type": "rwkv7"}, {"model_type": "exaone4", "is_causal": False}], {}
    for number, changed in enumerate(changes):
        model = shutil.copytree(tiny_target, tmp_path / f"model{number}")
        fields = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**fields, **changed}))
        models[f"some/model{number}"] = model
    start = f"from moa_server.cli import main\nfor name in {list(models)}: print(main(['--model', name]))"
    with standing_in(models) as hub:
        done = program(hub.url, start)
        assert done.stdout.split() == ["2"] * len(changes), done.stderr
        refusals = [line for line in done.stderr.splitlines() if line.endswith("[unsupported_target]")]
        assert len(refusals) == len(changes) and done.stderr.rstrip().endswith(refusals[-1]), done.stderr
        asked = [name for name, _ in hub.asked]
        assert asked.count("config.json") == len(changes) and "model.safetensors" not in asked


def test_a_drafter_can_be_a_name_on_the_hub(tiny_drafter, tmp_path, program) -> None:
    code = "from moa_drafter.pretrained import checkpoint_of\nfrom moa_drafter.drafter_weights import read_weights\n"
    code += "print(read_weights(checkpoint_of('some/head')).fingerprint)"
    with standing_in({"some/head": tiny_drafter}) as hub:
        done = program(hub.url, code)
        assert done.returncode == 0 and len(done.stdout.strip()) == 32, done.stderr
        assert {name for name, _ in hub.asked} == {"config.json", "model.safetensors"}
        missing = program(hub.url, "from moa_drafter.pretrained import checkpoint_of\ncheckpoint_of('some/other')")
    refusal = missing.stderr.rstrip().splitlines()[-1]
    assert "CheckpointError: " in refusal and "some/other" in refusal


def test_a_published_head_of_the_hub_drafts_at_the_server_and_on_the_device(tiny_target, tmp_path, program) -> None:
    weights, models = "pytorch_model.bin", ["--model", "some/model", "--drafter", "some/head"]
    head = write_head(tmp_path / "head", {"norm_before_residual": True}, of="authors")
    torch.save(load_torch_file(head / "model.safetensors"), head / weights)
    (head / "model.safetensors").unlink()
    ask = ["--once", "Name three colours.", "--json", "--max-new-tokens", "24", "--bundle", "BUNDLE"]
    bundle, code = str(tmp_path / "bundle"), "import sys\nfrom {}.cli import main\nsys.exit(main({!r}))"
    export = [*models, "--out", bundle, "--target", "onnx", "--offline-model", "none", "--no-checks"]
    serve = f"{BEGIN}import sys\nfrom moa_server.cli import main\nsys.exit(main())"
    with standing_in({"some/model": tiny_target, "some/head": head}, {weights: [PIECE + 100, PIECE + 5]}) as hub:
        own = environment(tmp_path, hub.url)
        with moa_serve(*models, "--dtype", "float32", program=serve, env=own) as (_, ready):
            assert [start for name, start in hub.asked if name == weights] == [0, PIECE, 2 * PIECE]
            hub.asked.clear()
            made = program(hub.url, code.format("moa_export", export))
            assert made.returncode == 0 and weights not in dict(hub.asked), made.stderr
            ask[-1:] = [bundle, "--server", ready["url"], "--drafting"]
            texts = set()
            for how in ("device", "server"):
                done = program(hub.url, code.format("moa_chat", [*ask, how]))
                assert done.returncode == 0, done.stderr
                texts.add(json.loads(done.stdout)["text"])
    assert len(texts) == 1
