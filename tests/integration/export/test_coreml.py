"""Core ML packages of the tiny drafter: written, read back, and computed with numpy in place of Core ML."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound
from moa_drafter.model import MoADrafter
from moa_drafter.pretrained import shipped_checkpoint
from moa_drafter.target import load_target
from moa_drafter.target_source import DEFAULT_TARGET
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.recordings import Recording
from moa_export.targets.base import TargetOptions
from moa_export.validation import compare, rehearse
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.coreml import CoremlBackend
from moa_runtime.drafters.moa import GrowingRows
from moa_runtime.errors import MoaError
from moa_runtime.manifest import TargetEntry
from support.late import Late

if TYPE_CHECKING:
    from moa_export.targets.coreml import CoremlTarget


ct, coreml, program = Late("coremltools"), Late("moa_export.targets.coreml"), Late("moa_export.targets.coreml_program")
CAPACITY = 96
RECIPES = {
    "float": Recipe(Weights(16), Weights(16), Weights(16)),
    "int8": Recipe(),
    "int4": Recipe(Weights(4), Weights(4), Weights(4)),
}
GRAPHS = ("coreml", "coreml-stateless")
Made = tuple[Path, dict[str, TargetEntry]]


@pytest.fixture(scope="module")
def made(drafter: MoADrafter, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The packages of a recipe; written once."""

    @functools.cache
    def make(name: str) -> Made:
        folder = tmp_path_factory.mktemp(name)
        return folder, exporter(RECIPES[name]).export(drafter, folder)

    return make


def exporter(recipe: Recipe) -> CoremlTarget:
    return coreml.CoremlTarget(recipe, TargetOptions(context=CAPACITY))


def runner(made: Made, name: str) -> Backend:
    folder, entries = made
    return exporter(RECIPES["float"]).runner(folder, entries[name])


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


@pytest.mark.parametrize("name", GRAPHS)
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


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("recipe", "error"), [("int8", 0.1), ("int4", 1.0)])
def test_a_quantised_package_is_near_pytorch(made, drafter, name, recipe, error):
    keys, values = (random := np.random.default_rng(3)).standard_normal((2, 60, 2, 16)).astype(np.float32)
    recording = Recording(random.integers(3, 512, 60).tolist(), 30, keys, values)
    parity = compare([rehearse(torch_backend_of(drafter, top_k=16), recording)], runner(made(recipe), name))
    assert parity.queries > 20
    assert 0 < parity.mean_logprob_error < error


def test_the_last_positions_of_a_full_cache_are_served(made: Callable[[str], Made], drafter: MoADrafter) -> None:
    rows = np.random.default_rng(1).standard_normal((2, CAPACITY, 2, 16)).astype(np.float32)
    tokens = list(range(100, 100 + CAPACITY))
    results = []
    for backend in (torch_backend_of(drafter, top_k=16), *(runner(made("float"), name) for name in GRAPHS)):
        feeder = Feeder(backend)
        fed = [feeder.feed(tokens[:83], [82], rows[:, :80]), feeder.feed(tokens[83:], [0, 12], rows[:, :CAPACITY])]
        results.append(np.concatenate([step.top_logprobs for step in fed]))
    np.testing.assert_allclose(results[1], results[0], atol=0.02)
    np.testing.assert_allclose(results[2], results[0], atol=0.02)


@pytest.mark.parametrize("name", GRAPHS)
def test_more_than_the_capacity_is_refused(made: Callable[[str], Made], name: str) -> None:
    feeder = Feeder(runner(made("float"), name))
    rows = np.zeros((2, CAPACITY + 1, 2, 16), np.float32)
    for tokens, memory in (([5] * (CAPACITY + 1), rows[:, :1]), ([5], rows)):
        with pytest.raises(MoaError, match=f" {CAPACITY + 1} .* {CAPACITY}"):
            feeder.feed(tokens, [0], memory)


@pytest.mark.parametrize("name", GRAPHS)
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


def test_the_same_export_gives_the_same_bytes(made: Callable[[str], Made], drafter: MoADrafter, tmp_path: Path) -> None:
    folder, _ = made("int4")
    exporter(RECIPES["int4"]).export(drafter, tmp_path)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 6
    for file in files:
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


@pytest.mark.parametrize("name", GRAPHS)
def test_the_package_describes_itself_and_the_manifest_the_package(made: Callable[[str], Made], name: str) -> None:
    folder, entries = made("int8")
    entry = entries[name]
    description = ct.models.utils.load_spec(str(folder / entry.file)).description
    metadata = description.metadata
    assert all((metadata.shortDescription, metadata.author, metadata.versionString, metadata.license))
    assert metadata.userDefined["linear"].startswith("int8")
    described = {function.name: function for function in description.functions}
    assert list(described) == (list(program.FUNCTIONS) if name == "coreml" else [])
    for function in described.values() or [description]:
        for feature in (*function.input, *function.output, *function.state):
            assert feature.shortDescription == coreml.FEATURES[feature.name]
    functions = Late("moa_export.coreml_interpreter").read_package(folder / entry.file)
    main = functions["step_1" if entry.states else "main"]
    sides = ((entry.inputs, main.inputs), (entry.outputs, main.outputs), (entry.states, main.states))
    for specs, tensors in sides:
        told = {spec.name: (spec.shape, np.dtype(spec.dtype)) for spec in specs}
        assert told == {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
    assert json.loads(json.dumps(entry.details)) == entry.details
    for function in functions.values():
        assert function.states.keys() == main.states.keys()


def test_no_operator_is_used_that_breaks_and_functions_share_their_weights(made: Callable[[str], Made]) -> None:
    folder, entries = made("float")
    shared, once = (
        (folder / entries[name].file / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size for name in GRAPHS
    )
    assert shared < 1.1 * once
    for entry in entries.values():
        specification = ct.models.utils.load_spec(str(folder / entry.file))
        assert specification.specificationVersion == (9 if entry.states else 8)
        for function in specification.mlProgram.functions.values():
            for block in function.block_specializations.values():
                assert "scaled_dot_product_attention" not in {operation.type for operation in block.operations}
                names = [output.name for operation in block.operations for output in operation.outputs]
                assert len(names) == len(set(names))
        content = b"".join(path.read_bytes() for path in (folder / entry.file).rglob("*") if path.is_file())
        assert str(Path(__file__).parents[3]).encode() not in content


@pytest.mark.skipif(platform.system() == "Darwin", reason="Core ML is there")
def test_the_runtime_backend_needs_a_mac_and_no_toolchain(tmp_path: Path) -> None:
    with pytest.raises(MoaError, match="macOS"):
        CoremlBackend(tmp_path)
    code = "import moa_runtime.backends.coreml, sys; print('torch' in sys.modules or 'coremltools' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "most"), [("laptop", 48e6), ("phone", 28e6)])
def test_the_default_drafter_becomes_small(preset: str, most: float, tmp_path: Path) -> None:
    drafter = load_bound(shipped_checkpoint(), load_target(DEFAULT_TARGET))
    for entry in coreml.CoremlTarget(PRESETS[preset], TargetOptions()).export(drafter, tmp_path).values():
        files = [path for path in (tmp_path / entry.file).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= most
