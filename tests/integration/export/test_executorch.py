"""ExecuTorch programs of the tiny drafter: lowered for each delegate, and run where the wheel can."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.model import MoADrafter
from moa_export.errors import ExportError
from moa_export.quantize import QuantisedEmbedding
from moa_export.quarot import random_rotation, rotate_residual_stream
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.targets.base import Artifact, NotRun, TargetOptions
from moa_export.targets.executorch import DELEGATES, ExecutorchTarget
from moa_export.targets.executorch_program import MOST_QUERIES, Embedding
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.executorch import ExecutorchBackend
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError

Made = tuple[Path, Artifact]


@pytest.fixture(scope="module")
def int8(every_target: Bundle) -> Path:
    return every_target.graph_path("executorch")


@pytest.fixture(scope="module")
def made(drafter: MoADrafter, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """The program of a preset for a delegate; each takes half a minute and is written once."""
    done: dict[tuple[str, str], Made] = {}

    def make(preset: str, delegate: str = "xnnpack") -> Made:
        if (preset, delegate) not in done:
            folder = tmp_path_factory.mktemp(preset)
            exporter = ExecutorchTarget(PRESETS[preset], TargetOptions(delegates=(delegate,)))
            (artifact,) = exporter.export(rotate_residual_stream(copy.deepcopy(drafter)), folder)
            done[preset, delegate] = folder, artifact
        return done[preset, delegate]

    return make


def runner(made: Made) -> Backend | NotRun:
    return ExecutorchTarget(Recipe(), TargetOptions()).runner(*made)


def step(backend: Backend, count: int = 5, cached: int = 11, rows: int = 7) -> StepResult:
    rng = np.random.default_rng(5)
    shape = backend.kv_shape
    cache, memory = (tuple(rng.standard_normal((2, size, *shape)).astype(np.float32)) for size in (cached, rows))
    return backend.step(StepInputs.chain(rng.integers(0, 512, count), cache, memory, asked=count))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "error"), [("max-quality", 1e-4), ("phone", 1.5)])
def test_what_runs_is_what_pytorch_computes(
    drafter: MoADrafter, made: Callable[..., Made], preset: str, error: float
) -> None:
    ours, theirs = step(runner(made(preset))), step(torch_backend_of(drafter, top_k=16))
    np.testing.assert_allclose(ours.keys, theirs.keys, atol=error)
    np.testing.assert_allclose(ours.values, theirs.values, atol=error)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=error)
    if preset == "max-quality":
        np.testing.assert_array_equal(ours.top_tokens, theirs.top_tokens)


@pytest.mark.slow
def test_fewer_bits_make_smaller_files(made: Callable[..., Made], int8: Path) -> None:
    phone, exact = ((made(name)[0] / "device_half.pte").stat().st_size for name in ("phone", "max-quality"))
    assert phone < 0.75 * int8.stat().st_size < 0.5 * exact


@pytest.mark.slow
def test_the_same_export_gives_the_same_bytes(made: Callable[..., Made], int8: Path) -> None:
    assert (made("laptop")[0] / "device_half.pte").read_bytes() == int8.read_bytes()


def test_more_tokens_and_queries_than_a_call_takes_are_fed_in_parts(drafter: MoADrafter, int8: Path) -> None:
    whole, parts = ExecutorchBackend(int8, threads=1), ExecutorchBackend(int8, threads=1)
    parts._most_tokens, parts._most_queries = 7, 3
    count = MOST_QUERIES + 4
    ours, theirs = step(parts, count), step(whole, count)
    np.testing.assert_array_equal(ours.top_tokens, theirs.top_tokens)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-4)
    np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-4)


def test_more_positions_than_the_program_holds_are_refused(drafter: MoADrafter, int8: Path) -> None:
    most = drafter.config.max_position_embeddings
    with pytest.raises(MoaError, match=f"{most + 1} positions are too many: the exported program holds {most}"):
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
    folder, artifact = made("phone", delegate)
    assert (folder / f"device_half.{delegate}.pte").stat().st_size > 1e5
    for method in artifact.details["methods"].values():
        assert method["subgraphs"] >= 1
        assert not any(name in operator for operator in method["fallen_back"] for name in ("linear", "mm", "bmm"))
    assert artifact.details["applied"]["activation_bits"] == (16 if delegate == "coreml" else 8)
    result = runner((folder, artifact))
    assert isinstance(result, NotRun) and DELEGATES[delegate].backend in result.reason


@pytest.mark.parametrize(
    ("recipe", "delegate", "reason"),
    [
        (Recipe(Weights(16), Weights(16), activation_bits=32), "xnnpack", "takes weights of 4, 8, 32 bits, not 16"),
        (Recipe(), "vulkan", "takes weights of 4, 32 bits, not 8"),
        (Recipe(Weights(4, 16)), "xnnpack", "a multiple of 32 4-bit weights, not 16"),
        (Recipe(Weights(8, 32, symmetric=False)), "xnnpack", "without an offset"),
        (Recipe(activation_bits=32), "xnnpack", "set activation_bits to 8"),
        (Recipe(embedding=Weights(16)), "xnnpack", "the embedding in 4, 8 or 32 bits"),
        (Recipe(Weights(4, 96), Weights(4, 96)), "xnnpack", "96 does not divide the drafter's"),
    ],
)
def test_recipes_that_cannot_be(drafter: MoADrafter, recipe: Recipe, delegate: str, reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        ExecutorchTarget(recipe, TargetOptions(delegates=(delegate,))).check(drafter.config)


def test_an_unknown_delegate_is_refused() -> None:
    with pytest.raises(ExportError, match="unknown --backend 'qnn': choose one of xnnpack, coreml, vulkan"):
        ExecutorchTarget(Recipe(), TargetOptions(delegates=("qnn",)))


def test_files_that_are_no_program(tmp_path: Path, int8: Path) -> None:
    broken = tmp_path / "broken.pte"
    broken.write_bytes(b"no program")
    with pytest.raises(MoaError, match=r"executorch cannot load .*broken.pte"):
        ExecutorchBackend(broken)
    whole = int8.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MoaError, match="executorch cannot load"):
        ExecutorchBackend(broken)
    with pytest.raises(MoaError, match="threads must be at least 1"):
        ExecutorchBackend(broken, threads=0)


def test_a_turned_residual_stream_changes_nothing(drafter: MoADrafter) -> None:
    turned = rotate_residual_stream(copy.deepcopy(drafter))
    ours, theirs = (step(torch_backend_of(one, top_k=16)) for one in (turned, drafter))
    np.testing.assert_array_equal(ours.top_tokens, theirs.top_tokens)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-3)
    np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-3)
    assert not torch.allclose(turned.embedding, drafter.embedding, atol=1e-2)


def test_a_rotation_is_orthogonal() -> None:
    rotation = random_rotation(48)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(48, dtype=torch.float64))


@pytest.mark.parametrize("weights", [Weights(8, 0), Weights(4, 32)], ids=["8 bits", "4 bits"])
def test_the_embedding_is_widened_to_the_same_numbers(drafter: MoADrafter, weights: Weights) -> None:
    table = QuantisedEmbedding(drafter.embedding, weights)
    tokens = torch.arange(200)
    torch.testing.assert_close(Embedding(table)(tokens), table(tokens), rtol=0, atol=0)


def test_a_missing_wheel_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['executorch'] = None\n"
        "from pathlib import Path\n"
        "from moa_runtime.backends.executorch import ExecutorchBackend\n"
        "from moa_runtime.errors import MoaError\n"
        "import json\n"
        "try: ExecutorchBackend(Path('x.pte'))\n"
        "except MoaError as error: print(json.dumps(str(error)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "moa-edge[executorch]"' in json.loads(ran.stdout)
