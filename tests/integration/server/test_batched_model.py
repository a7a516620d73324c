"""Both halves beside the target, in torch and in onnxruntime: equal to the reference, alone and several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import save_checkpoint
from moa_drafter.config import FitError
from moa_drafter.device_module import TorchBackend
from moa_drafter.drafter_weights import DrafterWeights, read_weights
from moa_drafter.model import MoADrafter
from moa_drafter.target_features import TargetStates
from moa_runtime.backends.base import StepInputs, StepResult
from moa_server.drafting.batched_model import PackedDeviceModule, PackedRows
from moa_server.drafting.onnx_drafter import OnnxDrafter, own_drafter
from moa_server.engine import onnx_rows
from moa_server.engine.base import Span
from moa_server.engine.load import drafting_backend
from moa_server.engine.torch_engine import load_torch_engine
from support.refusals import refused
from support.tiny import make_tiny_rival, tiny_with_layers
from support.toy_engine import ToyEngine

TOP_K = 8


def numbers(rng: np.random.Generator, count: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(rng.standard_normal((2, count, heads, 16)).astype(np.float32))


def inputs(
    seed: int, new: int, cached: int, memory: int, *, asked: int = 1, tree: bool = False, heads: int = 2
) -> StepInputs:
    """Random caches, and ``new`` tokens after them: a chain, or nodes of a tree that see some of each other."""
    rng = np.random.default_rng(seed)
    cache, rows = (numbers(rng, count, heads) for count in (cached, memory))
    made = StepInputs.chain(rng.integers(0, 512, new), cache, rows, asked=new if tree else asked)
    if not tree:
        return made
    mask = np.concatenate((np.ones((new, cached), np.bool_), np.eye(new, dtype=np.bool_)), axis=1)
    mask[:, cached // 2 : cached] = rng.random((new, cached - cached // 2)) < 0.5
    return replace(made, positions=np.full(new, cached, np.int64), self_mask=mask)


def many(heads: int = 2) -> list[StepInputs]:
    sizes = [(1, 1, 20, 20, {}), (2, 70, 0, 33, {}), (3, 7, 40, 38, {"tree": True}), (4, 3, 11, 9, {"asked": 2})]
    nothing = np.zeros((1, heads, 16), np.float32)  # without rows there is one of zeros
    made = [inputs(*each, heads=heads, **more) for *each, more in [*sizes, (5, 2, 5, 1, {})]]
    return [*made, replace(made[0], memory_keys=nothing, memory_values=nothing)]


MANY = many()


def assert_close(got: StepResult, expected: StepResult, error: float = 1e-4) -> None:
    for name in ("keys", "values", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=error)
    assert got.top_tokens.dtype == np.int64
    gaps = expected.top_logprobs[:, :-1] - expected.top_logprobs[:, 1:]
    clear = np.pad(gaps > 2 * error, ((0, 0), (1, 0)), constant_values=True)
    clear[:, :-1] &= gaps > 2 * error
    clear[:, -1] = False  # what follows it is not known
    np.testing.assert_array_equal(got.top_tokens[clear], expected.top_tokens[clear])


@pytest.fixture(scope="module")
def reference(drafter) -> TorchBackend:
    return torch_backend_of(drafter, top_k=TOP_K)


Half = PackedDeviceModule | OnnxDrafter
#: Makes a device half of a drafter.
MakeHalf = Callable[[MoADrafter], Half]


def saved(drafter: MoADrafter, folder: Path) -> DrafterWeights:
    save_checkpoint(drafter, folder, dtype=torch.float32)
    return read_weights(folder)


@pytest.fixture(params=["torch", "onnx"])
def half_of(request, target, tiny_target, tmp_path) -> MakeHalf:
    """In float32."""
    if request.param == "torch":
        return lambda drafter: PackedDeviceModule(drafter, target, torch.float32, top_k=TOP_K)
    weights = CheckpointWeights(tiny_target)
    return lambda drafter: OnnxDrafter(saved(drafter, tmp_path), weights, 1, top_k=TOP_K, bits=32)


def test_steps_are_those_of_the_reference_alone_and_at_once(half_of, drafter, reference):
    half = half_of(drafter)
    for got, given in zip(half.steps(MANY), MANY, strict=True):
        [alone] = half.steps([given])
        assert_close(alone, reference.step(given))
        assert_close(got, alone, 1e-5)


def test_rounded_products_are_close(drafter, target, reference, tiny_drafter, tiny_target):
    halves: Sequence[Half] = (
        PackedDeviceModule(drafter, target, torch.bfloat16, top_k=TOP_K),
        OnnxDrafter(read_weights(tiny_drafter), CheckpointWeights(tiny_target, 4), top_k=TOP_K),
    )
    for half in halves:
        for given in MANY:
            [result] = half.steps([given])
            np.testing.assert_allclose(result.top_logprobs, reference.step(given).top_logprobs, atol=0.2)
            assert result.keys.dtype == np.float32


def test_an_unbound_drafter_has_the_fitted_sharpness(drafter, half_of, reference):
    given, expected = MANY[0], reference.step(MANY[0])
    sharp = MoADrafter(replace(drafter.config, sharpness=3.0))
    sharp.load_state_dict(drafter.state_dict())
    [result] = half_of(sharp.eval()).steps([given])
    difference = result.top_logprobs[0, 0] - result.top_logprobs[0, 1]
    assert difference == pytest.approx(3 * (expected.top_logprobs[0, 0] - expected.top_logprobs[0, 1]), rel=1e-3)


def test_an_engine_without_a_whole_drafter_has_no_backend(
    transformers_engine, target, tiny_target, tiny_drafter, tmp_path, monkeypatch
):
    backend = drafting_backend(transformers_engine)
    assert backend is not None and backend.kv_shape == (2, 16)
    assert drafting_backend(ToyEngine()) is None
    assert drafting_backend(load_torch_engine(str(tiny_target), None)) is None
    for trained in (False, True):  # whose layers are in its checkpoint
        drafter = MoADrafter(tiny_with_layers(tiny_drafter, target, 1, trained=trained).config)
        monkeypatch.setattr(transformers_engine, "drafter", drafter)
        backend = drafting_backend(transformers_engine)
        assert (backend is not None) == trained
    rival = make_tiny_rival("independent", tiny_target, tmp_path / "alone")
    assert drafting_backend(load_torch_engine(str(tiny_target), rival)) is None
    weights = CheckpointWeights(tiny_target)
    assert own_drafter(None, weights, 1) is own_drafter(read_weights(rival), weights, 1) is None
    backend = own_drafter(read_weights(tiny_drafter), weights, 1)
    assert backend is not None and backend.kv_shape == (2, 16)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("count", [1, 2])
def test_layers_of_the_target_are_run_as_on_a_device(tiny_drafter, target, half_of, count, trained):
    drafter = tiny_with_layers(tiny_drafter, target, count, trained=trained)
    half = half_of(drafter)
    reference = torch_backend_of(drafter, top_k=TOP_K)
    assert half.kv_shape == reference.kv_shape
    given = many(half.kv_shape[0])
    for got, each in zip(half.steps(given), given, strict=True):
        assert_close(got, reference.step(each))


def test_copies_of_layers_that_compute_something_else_are_refused(tiny_drafter, tiny_target, target, tmp_path):
    drafter, weights = saved(tiny_with_layers(tiny_drafter, target, 1), tmp_path), CheckpointWeights(tiny_target)
    last = weights.spec.layers[-1]
    for change in ({"qkv_biases": True}, {"rotary": None}):
        other = replace(weights.spec, layers=(*weights.spec.layers[:-1], replace(last, **change)))
        with refused("wrong_target", FitError):
            OnnxDrafter(drafter, SimpleNamespace(spec=other))
    drafter.config = replace(drafter.config, rope_theta=20000.0)
    with refused("wrong_target", FitError):
        OnnxDrafter(drafter, weights)


def test_a_verifier_drafts_with_layers_of_its_target(tiny_drafter, tiny_target, target, tmp_path):
    drafter = tiny_with_layers(tiny_drafter, target, 1)
    save_checkpoint(drafter, tmp_path)
    engine = load_torch_engine(str(tiny_target), tmp_path, release_weights=True)
    backend, [given] = drafting_backend(engine), [inputs(1, 3, 20, 20, heads=4)]
    assert backend is not None and backend.kv_shape == (4, 16)
    got = backend.step(given)
    np.testing.assert_allclose(got.top_logprobs, torch_backend_of(drafter, top_k=16).step(given).top_logprobs, atol=0.2)


@pytest.mark.parametrize("layers", [0, 2], ids=lambda count: f"{count} target layers")
@pytest.mark.parametrize("scaled", [True, False], ids=["layer scale", "as published"])
@pytest.mark.parametrize("count", [0, 1, 7, 130])
def test_packed_rows_are_those_of_the_server_half(drafter, scaled, count, layers, tmp_path, monkeypatch):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        own = MoADrafter(replace(drafter.config, layer_scale=scaled, target_layers=layers)).eval()
        if scaled:
            own.layer_scale.data.uniform_(0.5, 2.0)
        kv = torch.randn(count, len(own.row_reads.kv_layers), own.config.target_kv_size)
    states = TargetStates(kv, kv[:, :0], kv[:, 0, :0])
    positions = torch.arange(40, 40 + count)
    with torch.no_grad():
        expected = own.rows(states, positions)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        for got, wanted in zip(PackedRows(own, dtype)(states, positions), expected, strict=True):
            assert got.dtype is torch.float32
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), atol=error)
    monkeypatch.setattr(onnx_rows, "CHUNK", 50)  # chunks end within a sequence and at its end
    held = SimpleNamespace(read=lambda layers, start, stop: kv.numpy()[start - 40 : stop - 40])
    spans = [None, Span(held, 40, 40 + count), Span(held, 40 + count // 2, 40 + count)]
    _, *got = onnx_rows.onnx_rows(saved(own, tmp_path), 1).of(spans)
    for rows, span in zip(got, spans[1:], strict=True):
        assert rows.start == span.start
        for half, wanted in zip((rows.keys, rows.values), expected, strict=True):
            np.testing.assert_allclose(half, wanted.numpy()[span.start - 40 :], atol=1e-4)


def test_rows_of_other_architectures_need_no_graph(tiny_target, tmp_path):
    eagle, alone = (
        read_weights(make_tiny_rival(name, tiny_target, tmp_path / name)) for name in ("eagle3", "independent")
    )
    features = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
    [rows] = onnx_rows.onnx_rows(eagle).of([Span(SimpleNamespace(features=features), 2, 5)])
    assert rows.start == 2 and rows.keys.shape == rows.values.shape == (3, *eagle.config.row_shape)
    both = np.concatenate([half.reshape(3, -1) for half in (rows.keys, rows.values)], axis=1)
    np.testing.assert_array_equal(both, features[2:5])
    assert onnx_rows.onnx_rows(alone) is None
