"""ExecuTorch programs of the tiny drafter: lowered for each delegate, and run where the wheel can."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.model import MoADrafter
from moa_export.quantize import QuantisedEmbedding
from moa_export.quarot import rotate_residual_stream
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.targets.base import NotRun, TargetOptions
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.executorch import ExecutorchBackend
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.manifest import TargetEntry
from support.late import Late

target, program = Late("moa_export.targets.executorch"), Late("moa_export.targets.executorch_program")
Made = tuple[Path, TargetEntry]


@pytest.fixture(scope="module")
def int8(every_target: Bundle) -> Path:
    return every_target.graph_path("executorch")


@pytest.fixture(scope="module")
def made(drafter: MoADrafter, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """The program of a preset for a delegate; each takes half a minute and is written once."""

    @functools.cache
    def make(preset: str, delegate: str = "xnnpack") -> Made:
        folder = tmp_path_factory.mktemp(preset)
        exporter = target.ExecutorchTarget(PRESETS[preset], TargetOptions(delegates=(delegate,)))
        (entry,) = exporter.export(rotate_residual_stream(copy.deepcopy(drafter)), folder).values()
        return folder, entry

    return make


def runner(made: Made) -> Backend | NotRun:
    return target.ExecutorchTarget(Recipe(), TargetOptions()).runner(*made)


def step(backend: Backend, count: int = 5, cached: int = 11, rows: int = 7) -> StepResult:
    rng = np.random.default_rng(5)
    shape = backend.kv_shape
    cache, memory = (tuple(rng.standard_normal((2, size, *shape)).astype(np.float32)) for size in (cached, rows))
    return backend.step(StepInputs.chain(rng.integers(0, 512, count), cache, memory, asked=count))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "error"), [("max-quality", 1e-4), ("phone", 1.5)])
def test_what_runs_is_what_pytorch_computes(drafter, made, preset, error):
    ours, theirs = step(runner(made(preset))), step(torch_backend_of(drafter, top_k=16))
    np.testing.assert_allclose(ours.keys, theirs.keys, atol=error)
    np.testing.assert_allclose(ours.values, theirs.values, atol=error)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=error)
    if preset == "max-quality":
        np.testing.assert_array_equal(ours.top_tokens, theirs.top_tokens)


@pytest.mark.slow
def test_fewer_bits_make_smaller_files_and_one_export_the_same_bytes(made: Callable[..., Made], int8: Path) -> None:
    phone, exact = ((made(name)[0] / "device_half.pte").stat().st_size for name in ("phone", "max-quality"))
    assert phone < 0.75 * int8.stat().st_size < 0.5 * exact
    assert (made("laptop")[0] / "device_half.pte").read_bytes() == int8.read_bytes()


def test_more_tokens_and_queries_than_a_call_takes_are_fed_in_parts(drafter: MoADrafter, int8: Path) -> None:
    whole, parts = ExecutorchBackend(int8, threads=1), ExecutorchBackend(int8, threads=1)
    parts._most_tokens, parts._most_queries = 7, 3
    count = program.MOST_QUERIES + 4
    ours, theirs = step(parts, count), step(whole, count)
    np.testing.assert_array_equal(ours.top_tokens, theirs.top_tokens)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-4)
    np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-4)


def test_more_positions_than_the_program_holds_are_refused(drafter: MoADrafter, int8: Path) -> None:
    most = drafter.config.max_position_embeddings
    with pytest.raises(MoaError, match=f"{most + 1} .* {most}"):
        step(ExecutorchBackend(int8), rows=most + 1)


def test_xnnpack_takes_all_but_lookups_and_the_choice(every_target: Bundle) -> None:
    """What falls back costs a copy in and out."""
    details = every_target.manifest.targets["executorch"].details
    left = {operator for method in details["methods"].values() for operator in method["fallen_back"]}
    assert {name.rpartition("_")[0] for name in left} == {
        "aten_cat", "aten_gather", "aten_index", "aten_slice_copy", "aten_topk", "dim_order_ops__to_dim_order_copy",
    }  # fmt: skip
    assert details["methods"]["draft"]["delegated"]["aten_linear_default"] >= 11
    names = {product["name"] for product in details["products"]}
    assert {"head", "k_proj", "self_attention.attention.q_proj", "cross_attention.mlp.down_proj"} <= names
    assert details["applied"]["linear"] == {"bits": 8, "group_size": 0, "symmetric": True}


@pytest.mark.slow
@pytest.mark.parametrize("delegate", ["coreml", "vulkan"])
def test_a_program_for_another_machine_is_lowered_but_not_run(made: Callable[..., Made], delegate: str) -> None:
    folder, entry = made("phone", delegate)
    assert (folder / f"device_half.{delegate}.pte").stat().st_size > 1e5
    for method in entry.details["methods"].values():
        assert method["subgraphs"] >= 1
        assert not any(name in operator for operator in method["fallen_back"] for name in ("linear", "mm", "bmm"))
    assert entry.details["applied"]["activation_bits"] == (16 if delegate == "coreml" else 8)
    result = runner((folder, entry))
    assert isinstance(result, NotRun) and target.DELEGATES[delegate].backend in result.reason


def test_files_that_are_no_program_are_refused(tmp_path: Path, int8: Path) -> None:
    whole, broken = int8.read_bytes(), tmp_path / "broken.pte"
    for content, threads in ((b"no program", 1), (whole[: len(whole) // 2], 1), (whole, 0)):
        broken.write_bytes(content)
        with pytest.raises(MoaError, match="broken.pte" if threads else "threads"):
            ExecutorchBackend(broken, threads=threads)


@pytest.mark.parametrize("weights", [Weights(8, 0), Weights(4, 32)], ids=["8 bits", "4 bits"])
def test_the_embedding_is_widened_to_the_same_numbers(drafter: MoADrafter, weights: Weights) -> None:
    table = QuantisedEmbedding(drafter.embedding, weights)
    tokens = torch.arange(200)
    torch.testing.assert_close(program.Embedding(table)(tokens), table(tokens), rtol=0, atol=0)


def test_a_missing_wheel_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['executorch'] = None\n"
        "from pathlib import Path\n"
        "from moa_runtime.backends.executorch import ExecutorchBackend\n"
        "from moa_runtime.errors import MoaError\n"
        "try: ExecutorchBackend(Path('x.pte'))\n"
        "except MoaError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "moa-edge[executorch]" in ran.stdout
