"""EAGLE-3 heads at the verifier: features, rows and drafts are the reference's, and the text is the target's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, load_checkpoint
from moa_drafter.config import CheckpointError, FitError
from moa_drafter.drafter_weights import read_weights
from moa_drafter.target_features import target_states
from moa_drafter.target_source import DEFAULT_TARGET
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.session.handshake import Limits
from moa_server.drafting.batched_eagle3 import BatchedEagle3
from moa_server.drafting.onnx_eagle3 import OnnxEagle3
from moa_server.drafting.packed_eagle3 import PackedEagle3
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.engine.base import StepRequest
from moa_server.engine.load import drafting_backend, load_local
from moa_server.engine.torch_engine import load_torch_engine
from support.drafter.eagle3_heads import OPTIONS, write_head
from support.refusals import refused
from support.server.drafted_answers import SAMPLINGS, answers, prompts
from support.server.stepping import plain, step
from support.tiny import make_tiny_target

TOP_K = 8
LIMITS = Limits(max_context=512)


def steps(backend: Backend) -> Iterator[StepInputs]:
    """Chains with and without rows, a text of one token, a further token, and nodes of a tree."""
    rng = np.random.default_rng(7)
    for new, rows in ((9, 8), (6, 2), (1, 0), (1, 1), (70, 66)):
        tokens, empty = rng.integers(0, 512, new + 6), (np.zeros((0, *backend.kv_shape), np.float32),) * 2
        memory = tuple(rng.standard_normal((2, rows, *backend.row_shape)).astype(np.float32))
        first = StepInputs.chain(tokens[:new], empty, memory, asked=min(new, 2))
        yield first
        found = backend.step(first)
        cache = found.keys, found.values
        yield StepInputs.chain(tokens[new : new + 2], cache, memory)
        seen = np.array([new, new, (new + 1) // 2, 1])  # cached tokens before each node
        mask = np.concatenate((np.arange(new) < seen[:, None], np.eye(4, dtype=np.bool_)), axis=1)
        level = StepInputs.chain(tokens[new : new + 4], cache, memory, asked=4)
        yield replace(level, positions=seen, self_mask=mask)


def assert_close(got: StepResult, expected: StepResult, error: float) -> None:
    for name in ("keys", "values", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=error, rtol=error)
    clear = np.diff(expected.top_logprobs, append=-np.inf) < -2 * error
    clear[:, 1:] &= clear[:, :-1]
    clear[:, -1] = False  # what follows it is not known
    np.testing.assert_array_equal(got.top_tokens[clear], expected.top_tokens[clear])


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_of_the_reference_alone_and_at_once(tmp_path, target, tiny_target, options):
    folder = write_head(tmp_path, OPTIONS[options])
    weights, module = read_weights(folder), load_checkpoint(folder)
    reference = torch_backend_of(load_bound(folder, target), top_k=TOP_K)
    halves = (
        OnnxEagle3(weights, CheckpointWeights(tiny_target), 1, top_k=TOP_K, bits=32),
        PackedEagle3(module, target, torch.float32, top_k=TOP_K),
    )
    for half in halves:
        backend, given = BatchedEagle3(half), list(steps(reference))
        assert (backend.kv_shape, backend.row_shape) == (reference.kv_shape, reference.row_shape)
        for got, each in zip(backend.steps(given), given, strict=True):
            alone = backend.step(each)
            assert_close(alone, reference.step(each), 1e-4)
            assert_close(got, alone, 1e-5)
    rounded = BatchedEagle3(OnnxEagle3(weights, CheckpointWeights(tiny_target, 4), top_k=TOP_K))
    for each in given:
        np.testing.assert_allclose(rounded.step(each).top_logprobs, reference.step(each).top_logprobs, atol=0.3)


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.levelname == "ERROR"]


#: Of a head's options those that change rows; steps are compared above.
OF_ROWS = ("plain", "norm_before_fc", "fc_norm", "own embedding")


@pytest.mark.parametrize("load", [load_local, load_torch_engine], ids=["onnx", "torch"])
@pytest.mark.parametrize("options", OF_ROWS)
def test_rows_are_features_and_the_text_is_the_targets(tmp_path, target, tiny_target, load, options, caplog):
    folder = write_head(tmp_path, OPTIONS[options], of="authors")
    engine, head = load(str(tiny_target), folder, dtype="float32"), load_bound(folder, target)
    text = prompts(1)[0]
    rows = step(engine, StepRequest(1, text, sampling=SAMPLINGS[0], rows_from=2)).rows
    with torch.no_grad():
        expected = head.rows(target_states(target, text, head.row_reads), torch.arange(len(text)))
    for own, half in zip((rows.keys, rows.values), expected, strict=True):
        np.testing.assert_allclose(own, half[2:], atol=2e-4)
    accepted = 0
    for sampling in SAMPLINGS:
        backend = drafting_backend(engine, 1)
        drafting = ServerDrafting(backend, LIMITS, engine.stop_tokens, clock=lambda: 0.0)
        found = answers(engine, drafting, prompts(2), sampling, 16)
        drafting.close()
        assert [text for text, _ in found] == [plain(engine, prompt, sampling, 16) for prompt in prompts(2)]
        accepted += sum(count for _, count in found)
    assert accepted > 0 and not failures(caplog)
    engine.close()


@pytest.mark.slow
def test_the_text_of_the_built_in_target_in_4_bits_stays_as_it_is(tmp_path, caplog):
    folder = write_head(tmp_path, {"hidden": 576, "vocab": 49152})
    engine = load_local(DEFAULT_TARGET, folder, dtype="int4", threads=1)
    drafting = ServerDrafting(drafting_backend(engine, 1), LIMITS, engine.stop_tokens, clock=lambda: 0.0)
    for sampling in SAMPLINGS:
        found = answers(engine, drafting, prompts(2), sampling, 12)
        assert [text for text, _ in found] == [plain(engine, prompt, sampling, 12) for prompt in prompts(2)]
    assert not failures(caplog)
    drafting.close()
    engine.close()


@pytest.mark.parametrize("load", [load_local, load_torch_engine], ids=["onnx", "torch"])
def test_a_head_of_another_target_is_refused(tmp_path, tiny_target, load):
    wide = make_tiny_target(tmp_path / "wide", hidden_size=128)
    head = write_head(tmp_path / "head")
    with refused("wrong_target", FitError):
        load(str(wide), head, dtype="float32")
    deep = write_head(tmp_path / "deep", config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    with refused("wrong_target", FitError):
        load(str(tiny_target), deep, dtype="float32")
    with refused("weights_differ", CheckpointError):
        load(str(tiny_target), write_head(tmp_path / "short", without="layers.0.hidden_norm.weight"), dtype="float32")
    short = write_head(tmp_path / "authors", of="authors", without="fc.weight")
    with refused("weights_differ", CheckpointError) as caught:
        load(str(tiny_target), short, dtype="float32")
    assert "Ekv2E" not in str(caught.value)
