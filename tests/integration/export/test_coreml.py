"""Core ML packages of the tiny drafter: written, read back, and computed with numpy in place of Core ML."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 - its customary name
from coremltools.converters.mil.mil import Function, types

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound
from moa_drafter.model import MoADrafter
from moa_drafter.pretrained import shipped_checkpoint
from moa_drafter.target import load_target
from moa_drafter.target_source import DEFAULT_TARGET
from moa_export.coreml_interpreter import MilFunction, read_package
from moa_export.errors import ExportError
from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import PRESETS, Recipe, Tolerance, Weights
from moa_export.recordings import Recording
from moa_export.targets.base import Artifact, TargetOptions
from moa_export.targets.coreml import FEATURES, CoremlTarget
from moa_export.targets.coreml_program import FUNCTIONS, fit_palette, stored_embedding, stored_linear
from moa_export.validation import compare, rehearse
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.coreml import CoremlBackend
from moa_runtime.drafters.moa import GrowingRows
from moa_runtime.errors import MoaError

CAPACITY = 96
RECIPES = {
    "float": Recipe(Weights(16), Weights(16), Weights(16)),
    "int8": Recipe(),
    "int4": Recipe(Weights(4), Weights(4), Weights(4)),
}
ARTIFACTS = ("coreml", "coreml-stateless")
Made = tuple[Path, dict[str, Artifact]]


@pytest.fixture(scope="module")
def made(drafter: MoADrafter, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The packages of a recipe; written once."""
    done: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            done[name] = folder, {one.name: one for one in exporter(RECIPES[name]).export(drafter, folder)}
        return done[name]

    return make


def exporter(recipe: Recipe, context: int = CAPACITY) -> CoremlTarget:
    return CoremlTarget(recipe, TargetOptions(context=context))


def runner(made: Made, name: str) -> Backend:
    folder, artifacts = made
    return exporter(RECIPES["float"]).runner(folder, artifacts[name])


class Feeder:
    """Feeds a backend from a self-attention cache of its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.cache = GrowingRows(backend.kv_shape)

    def feed(
        self, tokens: list[int], queries: list[int], memory: np.ndarray, mask: np.ndarray | None = None
    ) -> StepResult:
        held = self.cache.length
        inputs = StepInputs.chain(tokens, self.cache.first(held), tuple(memory))
        inputs = dataclasses.replace(inputs, queries=np.array(queries, np.int64))
        if mask is not None:
            inputs.positions[:] = held + mask.sum(1) - 1
            inputs.self_mask[:, held:] = mask
        result = self.backend.step(inputs)
        self.cache.write(held, result.keys, result.values)
        return result


def conversation(backend: Backend) -> list[StepResult]:
    """Every kind of step: a long catch-up, single tokens, a tree, a rollback, more and other memory rows."""
    random = np.random.default_rng(7)
    rows = random.standard_normal((2, 70, *backend.kv_shape)).astype(np.float32)
    tokens = random.integers(3, 512, 90).tolist()
    feeder = Feeder(backend)
    results = [feeder.feed(tokens[:1], [0], rows[:, :1])]
    results.append(feeder.feed(tokens[1:51], [49, 45], rows[:, :40]))
    results += [feeder.feed([token], [0], rows[:, :40]) for token in tokens[51:53]]
    parents = (-1, -1, 0, 0, 1, 2, 4, 5, 5, 8)
    tree = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            tree[node] |= tree[parent]
    results.append(feeder.feed(tokens[60:70], list(range(10)), rows[:, :40], tree))
    feeder.cache.truncate(51)
    results.append(feeder.feed(tokens[51:62], [0, 10], rows[:, :61]))
    feeder.cache.truncate(20)
    results.append(feeder.feed(tokens[20:23], [2], rows[:, 5:15]))
    return results


@pytest.fixture(scope="module")
def expected(drafter: MoADrafter) -> list[StepResult]:
    return conversation(torch_backend_of(drafter, top_k=16))


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_float_package_answers_as_pytorch(made: Callable[[str], Made], expected: list[StepResult], name: str) -> None:
    backend = runner(made("float"), name)
    assert (backend.top_k, backend.kv_shape) == (16, (2, 16))
    for ours, theirs in zip(conversation(backend), expected, strict=True):
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=0.02)
        np.testing.assert_allclose(ours.keys, theirs.keys, atol=0.02)
        np.testing.assert_allclose(ours.values, theirs.values, atol=0.02)
        for mine, wanted, logprobs in zip(ours.top_tokens, theirs.top_tokens, theirs.top_logprobs, strict=True):
            # Candidates nearer than rounding may trade places; whoever follows the last one is not known.
            apart = np.flatnonzero(np.abs(np.diff(logprobs)) > 0.04) + 1
            assert apart.size
            for ours_here, theirs_here in zip(np.split(mine, apart)[:-1], np.split(wanted, apart)[:-1], strict=True):
                assert set(ours_here) == set(theirs_here)


@pytest.mark.parametrize("name", ARTIFACTS)
@pytest.mark.parametrize(("recipe", "error"), [("int8", 0.1), ("int4", 1.0)])
def test_a_quantised_package_is_near_pytorch(
    made: Callable[[str], Made], drafter: MoADrafter, name: str, recipe: str, error: float
) -> None:
    parity = compare([rehearse(torch_backend_of(drafter, top_k=16), recording(drafter))], runner(made(recipe), name))
    assert parity.queries > 20
    assert 0 < parity.mean_logprob_error < error


def recording(drafter: MoADrafter) -> Recording:
    """Random tokens and rows in the shape of a conversation."""
    random = np.random.default_rng(3)
    keys, values = random.standard_normal((2, 60, 2, 16)).astype(np.float32)
    return Recording(random.integers(3, 512, 60).tolist(), 30, keys, values)


def test_the_last_positions_of_a_full_cache_are_served(made: Callable[[str], Made], drafter: MoADrafter) -> None:
    rows = np.random.default_rng(1).standard_normal((2, CAPACITY, 2, 16)).astype(np.float32)
    tokens = list(range(100, 100 + CAPACITY))
    results = []
    for backend in (torch_backend_of(drafter, top_k=16), *(runner(made("float"), name) for name in ARTIFACTS)):
        feeder = Feeder(backend)
        fed = [feeder.feed(tokens[:83], [82], rows[:, :80]), feeder.feed(tokens[83:], [0, 12], rows[:, :CAPACITY])]
        results.append(np.concatenate([step.top_logprobs for step in fed]))
    np.testing.assert_allclose(results[1], results[0], atol=0.02)
    np.testing.assert_allclose(results[2], results[0], atol=0.02)


@pytest.mark.parametrize("name", ARTIFACTS)
def test_more_than_the_capacity_is_one_sentence(made: Callable[[str], Made], name: str) -> None:
    feeder = Feeder(runner(made("float"), name))
    rows = np.zeros((2, CAPACITY + 1, 2, 16), np.float32)
    with pytest.raises(MoaError, match=f"needs {CAPACITY + 1} positions, this Core ML model holds {CAPACITY}"):
        feeder.feed([5] * (CAPACITY + 1), [0], rows[:, :1])
    with pytest.raises(MoaError, match=f"needs {CAPACITY + 1} positions, this Core ML model holds {CAPACITY}"):
        feeder.feed([5], [0], rows)


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_cache_from_elsewhere_is_taken_over(made: Callable[[str], Made], drafter: MoADrafter, name: str) -> None:
    tokens, rows = list(range(30, 50)), np.ones((2, 3, 2, 16), np.float32)
    torch_side, other_side = Feeder(torch_backend_of(drafter, top_k=16)), Feeder(runner(made("float"), name))
    other_side.feed(tokens[10:], [0], rows)  # the states hold something else
    torch_side.feed(tokens, [0], rows)
    other_side.cache = torch_side.cache
    ours = other_side.feed([77], [0], rows)
    torch_side.cache.truncate(len(tokens))
    theirs = torch_side.feed([77], [0], rows)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=0.02)


@pytest.mark.parametrize(("name", "group_size"), [("coreml", 32), ("coreml-stateless", 0)])
def test_a_damaged_weight_is_noticed(
    made: Callable[[str], Made], drafter: MoADrafter, tmp_path: Path, name: str, group_size: int
) -> None:
    folder, artifacts = made("int8")
    expected = [rehearse(torch_backend_of(drafter, top_k=16), recording(drafter))]
    tolerance = Tolerance(top1_agreement=0.8, top_k_overlap=0.8)
    assert not compare(expected, runner((folder, artifacts), name)).failures(tolerance)
    shutil.copytree(folder, tmp_path / "damaged")
    weights = tmp_path / "damaged" / artifacts[name].file / "Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(weights.read_bytes())
    codes = round_symmetric(drafter.head, 8, group_size)[0].numpy()
    at = bytes(content).find(codes.tobytes())
    assert at > 0
    content[at : at + codes.size] = codes[::-1].tobytes()
    weights.write_bytes(content)
    damaged = compare(expected, runner((tmp_path / "damaged", artifacts), name))
    assert damaged.failures(tolerance)


def test_the_same_export_gives_the_same_bytes(made: Callable[[str], Made], drafter: MoADrafter, tmp_path: Path) -> None:
    folder, _ = made("int4")
    exporter(RECIPES["int4"]).export(drafter, tmp_path)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 6
    for file in files:
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


@pytest.mark.parametrize("name", ARTIFACTS)
def test_xcode_has_something_to_show(made: Callable[[str], Made], name: str) -> None:
    folder, artifacts = made("int8")
    description = ct.models.utils.load_spec(str(folder / artifacts[name].file)).description
    metadata = description.metadata
    assert all((metadata.shortDescription, metadata.author, metadata.versionString))
    assert metadata.license.startswith("Apache-2.0")
    assert metadata.userDefined["linear"].startswith("int8")
    functions = {function.name: function for function in description.functions}
    assert list(functions) == (list(FUNCTIONS) if name == "coreml" else [])
    for function in functions.values() or [description]:
        for feature in (*function.input, *function.output, *function.state):
            assert feature.shortDescription == FEATURES[feature.name]


@pytest.mark.parametrize("name", ARTIFACTS)
def test_the_artifact_describes_the_package(made: Callable[[str], Made], name: str) -> None:
    folder, artifacts = made("int8")
    artifact = artifacts[name]
    functions = read_package(folder / artifact.file)
    main = functions["step_1" if artifact.states else "main"]
    for specs, tensors in (
        (artifact.inputs, main.inputs),
        (artifact.outputs, main.outputs),
        (artifact.states, main.states),
    ):
        told = {spec.name: (spec.shape, np.dtype(spec.dtype)) for spec in specs}
        assert told == {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
    assert json.loads(json.dumps(artifact.details)) == artifact.details
    for function in functions.values():
        assert function.states.keys() == main.states.keys()


def test_no_operator_is_used_that_breaks_and_functions_share_their_weights(made: Callable[[str], Made]) -> None:
    folder, artifacts = made("float")
    weights = folder / artifacts["coreml"].file / "Data/com.apple.CoreML/weights/weight.bin"
    once = folder / artifacts["coreml-stateless"].file / "Data/com.apple.CoreML/weights/weight.bin"
    assert weights.stat().st_size < 1.1 * once.stat().st_size
    for artifact in artifacts.values():
        specification = ct.models.utils.load_spec(str(folder / artifact.file))
        assert specification.specificationVersion == (9 if artifact.states else 8)
        for function in specification.mlProgram.functions.values():
            for block in function.block_specializations.values():
                assert "scaled_dot_product_attention" not in {operation.type for operation in block.operations}
                names = [output.name for operation in block.operations for output in operation.outputs]
                assert len(names) == len(set(names))
        content = b"".join(path.read_bytes() for path in (folder / artifact.file).rglob("*") if path.is_file())
        assert str(Path(__file__).parents[3]).encode() not in content


def evaluated(opset: ct.target, values: np.ndarray, use: Callable[[Any], Any]) -> np.ndarray:
    kind = types.numpy_type_to_builtin_type(values.dtype)
    with Function({"x": mb.TensorSpec(values.shape, kind)}, opset_version=opset) as function:
        function.set_outputs([use(function.inputs["x"])])
    (result,) = MilFunction(function)({"x": values}).values()
    return result.astype(np.float32)


@pytest.mark.parametrize("opset", [ct.target.iOS17, ct.target.iOS18])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_stored_matrix_is_as_near_as_its_bits_allow(bits: int, opset: ct.target) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 40)[:, None]
    weight[7] = 0
    linear = stored_linear("matrix", weight, Weights(bits, 16), opset)
    stored = evaluated(opset, np.eye(64, dtype=np.float16), linear).T
    error = np.abs(stored - weight.numpy())
    if bits == 4:  # a palette, or scales that clip: no bound for each number
        spread = np.sqrt(np.square(weight.numpy()).mean(axis=1))
        assert (np.sqrt(np.square(error).mean(axis=1)) <= 0.1 * spread + 2**-14).all()
        assert opset != ct.target.iOS17 or len(np.unique((stored[0] / spread[0]).round(3))) <= 64
        return
    group = 16 if opset == ct.target.iOS18 else 64
    largest = weight.abs().unflatten(1, (-1, group)).amax(2).repeat_interleave(group, 1).numpy()
    step = {16: 2**-10, 8: 1 / 127}[bits] * largest
    assert (error <= 0.52 * step + 2**-13 * largest).all()


@pytest.mark.parametrize("spec", [Weights(16), Weights(8, 0), Weights(8, 16), Weights(4, 0), Weights(4, 32)])
def test_the_stored_embedding_gives_the_rows_of_the_other_targets(spec: Weights) -> None:
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    tokens = np.array([0, 49, 7, 7], np.int32)
    rows = evaluated(ct.target.iOS17, tokens, stored_embedding("table", table, spec))
    other = QuantisedEmbedding(table, spec)(torch.from_numpy(tokens)) if spec.is_integer else table[tokens]
    np.testing.assert_allclose(rows, other.numpy(), rtol=2**-10)


def test_a_palette_follows_the_values() -> None:
    values = np.array([-3, -1, -0.5, 0.25, 1, 2], np.float32)
    weight = np.random.default_rng(0).permuted(np.tile(values, (30, 10)), axis=1)
    indices, palette, scales = fit_palette(weight, 16)
    np.testing.assert_allclose(palette[indices] * scales, weight, rtol=0.02)


@pytest.mark.parametrize(
    ("recipe", "context", "message"),
    [
        (Recipe(linear=Weights(8, 48)), CAPACITY, "a group size of 48 does not divide the drafter's hidden size of 64"),
        (Recipe(head=Weights(4, 128)), CAPACITY, "a group size of 128 does not divide the drafter's hidden size of 64"),
        (
            Recipe(embedding=Weights(4, 48)),
            CAPACITY,
            "a group size of 48 does not divide the drafter's hidden size of 64",
        ),
        (Recipe(linear=Weights(symmetric=False)), CAPACITY, "coreml stores the linear weights without an offset"),
        (Recipe(), 100, "a --context that is a multiple of 32 and at most 8192, not 100"),
        (Recipe(), 16384, "a --context that is a multiple of 32 and at most 8192, not 16384"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(
    drafter: MoADrafter, recipe: Recipe, context: int, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        exporter(recipe, context).check(drafter.config)


def test_usual_recipes_are_accepted(drafter: MoADrafter) -> None:
    for recipe in (*RECIPES.values(), Recipe(Weights(32), Weights(16), Weights(4, 0))):
        exporter(recipe).check(drafter.config)


@pytest.mark.skipif(platform.system() == "Darwin", reason="Core ML is there")
def test_the_runtime_backend_says_that_it_needs_a_mac(made: Callable[[str], Made]) -> None:
    folder, artifacts = made("int8")
    with pytest.raises(MoaError, match="Core ML runs on macOS only"):
        CoremlBackend(folder / artifacts["coreml-stateless"].file)


def test_the_runtime_backend_is_imported_without_a_toolchain() -> None:
    code = "import moa_runtime.backends.coreml, sys; print('torch' in sys.modules or 'coremltools' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "most"), [("laptop", 48e6), ("phone", 28e6)])
def test_the_default_drafter_becomes_small(preset: str, most: float, tmp_path: Path) -> None:
    drafter = load_bound(shipped_checkpoint(), load_target(DEFAULT_TARGET))
    for artifact in CoremlTarget(PRESETS[preset], TargetOptions()).export(drafter, tmp_path):
        files = [path for path in (tmp_path / artifact.file).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= most
