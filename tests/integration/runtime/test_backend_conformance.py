"""Every backend meets the same contract and makes the same drafts, on the tiny drafter's bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import SharedBackend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.moa import MoaDrafter
from support.drafted import draft_of
from support.refusals import refused

KV_HEADS, HEAD_DIM, VOCAB_SIZE = 2, 16, 512
PREFIX = list(range(40, 52))


def rows(count: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((2, count, KV_HEADS, HEAD_DIM)).astype(np.float32))


def step(backend: Backend, tokens, cached: int = 0, queries=None, mask=None, cache=None, memory: int = 9) -> StepResult:
    cache = rows(cached, seed=4) if cache is None else cache
    inputs = StepInputs.chain(tokens, cache, rows(memory), asked=len(tokens))
    if queries is not None:
        inputs = replace(inputs, queries=np.array(queries, np.int64))
    if mask is not None:
        inputs = replace(inputs, self_mask=mask)
    return backend.step(inputs)


def assert_alike(got: StepResult, expected: StepResult) -> None:
    """Check equality within 8 bits of rounding, and the order of two candidates that are not almost equal."""
    np.testing.assert_allclose(got.keys, expected.keys, atol=0.1)
    np.testing.assert_allclose(got.values, expected.values, atol=0.1)
    assert got.top_tokens.shape == expected.top_tokens.shape
    for row in range(len(expected.top_tokens)):
        ours = dict(zip(got.top_tokens[row].tolist(), got.top_logprobs[row].tolist(), strict=True))
        for token, logprob in zip(expected.top_tokens[row].tolist(), expected.top_logprobs[row].tolist(), strict=True):
            if token in ours:
                assert ours[token] == pytest.approx(logprob, abs=0.3)
        best, second = expected.top_logprobs[row, :2]
        if best - second > 0.3:
            assert got.top_tokens[row, 0] == expected.top_tokens[row, 0]


def test_the_fields_of_a_step_are_the_inputs_of_the_graph(every_target: Bundle) -> None:
    nothing = rows(0)
    named = StepInputs.chain([7, 8], nothing, nothing, asked=1).by_name()
    specs = every_target.manifest.targets["onnx"].inputs
    assert list(named) == [spec.name for spec in specs]
    assert [str(array.dtype) for array in named.values()] == [spec.dtype for spec in specs]
    assert named["memory_keys"] is nothing[0] and named["memory_values"] is nothing[1]


def test_a_graph_that_begins_with_layers_of_the_target_is_refused(tmp_path: Path) -> None:
    """Older versions wrote such graphs; their cache entries have more heads than their memory rows."""
    shapes = {"self_keys": ["S", 6, 16], "memory_keys": ["M", 4, 16], "logprobs": ["Q", 16]}
    held = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    held["top_tokens"] = helper.make_tensor_value_info("top_tokens", TensorProto.FLOAT, shapes["logprobs"])
    given = [held["self_keys"], held["memory_keys"], held["logprobs"]]
    node = helper.make_node("Identity", ["logprobs"], ["top_tokens"])
    graph = helper.make_graph([node], "device half", given, [held["top_tokens"]])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "graph.onnx")
    with refused("cannot_load"):
        OnnxBackend(tmp_path / "graph.onnx")


def test_a_shared_backend_has_the_properties_of_its_own() -> None:
    class Other(Backend):
        top_k, kv_shape, max_positions, row_shape = 3, (1, 2), 7, (4, 5)
        needs_a_row, entries_from_rows, heads_first, writer = False, True, True, "executorch_writer"

        def step(self, inputs: StepInputs) -> StepResult:
            raise NotImplementedError

    names = [*Backend.__annotations__, "row_shape"]
    assert len(names) == 8
    shared = SharedBackend(Other())
    assert [getattr(shared, name) for name in names] == [getattr(Other, name) for name in names]


def test_shapes_and_dtypes(backend: Backend) -> None:
    assert backend.kv_shape == (KV_HEADS, HEAD_DIM)
    result = step(backend, [7, 8, 9], cached=5, queries=[2, 0])
    assert result.top_tokens.shape == result.top_logprobs.shape == (2, backend.top_k)
    assert result.keys.shape == result.values.shape == (3, KV_HEADS, HEAD_DIM)
    assert result.top_tokens.dtype == np.int64
    assert {result.top_logprobs.dtype, result.keys.dtype, result.values.dtype} == {np.dtype(np.float32)}
    assert (np.diff(result.top_logprobs, axis=1) <= 0).all() and (result.top_logprobs <= 1e-3).all()
    assert ((result.top_tokens >= 0) & (result.top_tokens < VOCAB_SIZE)).all()


@pytest.mark.parametrize(("cached", "count", "memory"), [(0, 1, 1), (0, 12, 1), (1, 1, 40), (70, 9, 3), (5, 100, 70)])
def test_any_sizes(backend: Backend, reference: Backend, cached: int, count: int, memory: int) -> None:
    tokens = [(13 * n) % VOCAB_SIZE for n in range(count)]
    arguments = {"cached": cached, "queries": [count - 1], "memory": memory}
    assert_alike(step(backend, tokens, **arguments), step(reference, tokens, **arguments))


def test_queries_come_in_the_order_asked(backend: Backend) -> None:
    some, all_of_them = step(backend, [5, 6, 7, 8], queries=[3, 1]), step(backend, [5, 6, 7, 8])
    np.testing.assert_array_equal(some.top_tokens, all_of_them.top_tokens[[3, 1]])


def test_the_mask_makes_a_tree(backend: Backend, reference: Backend) -> None:
    """Two branches of one token each after two cached tokens: neither sees the other."""
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 1]], np.bool_)
    both = step(backend, [30, 31], cached=2, mask=mask)
    assert_alike(both, step(reference, [30, 31], cached=2, mask=mask))
    np.testing.assert_allclose(both.top_logprobs[0], step(backend, [30], cached=2).top_logprobs[0], atol=0.05)


def test_tokens_at_once_equal_tokens_one_by_one(backend: Backend) -> None:
    at_once = step(backend, [9, 10, 11])
    keys, values = rows(0)
    for n, token in enumerate([9, 10, 11]):
        one = step(backend, [token], cached=n, cache=(keys, values))
        keys, values = np.concatenate((keys, one.keys)), np.concatenate((values, one.values))
    np.testing.assert_allclose(keys, at_once.keys, atol=0.05)
    np.testing.assert_allclose(one.top_logprobs[0], at_once.top_logprobs[2], atol=0.1)


def test_memory_rows_are_read_and_inputs_left_as_they_were(backend: Backend) -> None:
    cache = rows(6)
    before = [array.copy() for array in cache]
    few, many = (step(backend, [1, 2], cached=6, cache=cache, memory=memory) for memory in (2, 9))
    assert not np.allclose(few.top_logprobs, many.top_logprobs, atol=1e-3)
    for array, kept in zip(cache, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_the_same_rows_give_the_same_draft_also_after_a_rollback(backend: Backend, reference: Backend) -> None:
    drafts = []
    for side in (reference, backend):
        drafter = MoaDrafter(side, max_context=512)
        drafter.add_rows(0, *rows(len(PREFIX) - 1))
        first = draft_of(drafter, PREFIX, 4)
        draft_of(drafter, [*PREFIX[:6], 77, 78], 2)  # another branch, which goes back to position 6
        again = draft_of(drafter, PREFIX, 4)
        assert [guess.token for guess in again] == [guess.token for guess in first]
        drafts.append(first)
    for ours, theirs in zip(*drafts, strict=True):
        assert theirs.logprob == pytest.approx(ours.logprob, abs=0.3)
        if ours.token != theirs.token:  # from here on the paths differ
            break
