"""The pass in onnxruntime: its rows are the same to the bit in any pieces, trees and company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moa_decoder.spec import DecoderSpec, LayerSpec, Rotary
from moa_server.engine import invariance
from moa_server.engine.onnx_pass import OnnxPass
from moa_server.engine.target_pass import Piece
from support.random_weights import RandomWeights

_LAYER = LayerSpec(4, 2, 32, 96, "silu", 32**-0.5, Rotary(10000.0 ** (-np.arange(16) / 16)))
_TEXT = [(7919 * index) % 61 for index in range(200)]
_LAYERS = {
    "grouped": (_LAYER, _LAYER),
    "window": (replace(_LAYER, window=70), replace(_LAYER, attention_cap=5.0)),
    "single query head": (replace(_LAYER, heads=2, head_dim=128), replace(_LAYER, heads=2, head_dim=128, rotary=None)),
}
_WEIGHTS = [(4, True, "grouped"), (4, False, "window"), (8, False, "single query head"), (32, False, "grouped")]


class _First:
    """A :class:`moa_server.engine.target_pass.Fusion` of what the first layer gives."""

    inner_layers, size = (0,), 128

    def __call__(self, states: Sequence[np.ndarray]) -> np.ndarray:
        return states[0]


@pytest.fixture(scope="module", params=_WEIGHTS, ids=str)
def onnx_pass(request) -> OnnxPass:
    bits, offsets, layers = request.param
    spec = DecoderSpec(64, 128, 1e-5, _LAYERS[layers], 512)
    return OnnxPass(RandomWeights(spec, bits, offsets), threads=1 + (bits == 8), fusion=_First())


def test_rows_do_not_depend_on_pieces_and_neighbours(onnx_pass: OnnxPass) -> None:
    whole, mine, beside = (onnx_pass.cache_shape.new_cache(len(_TEXT)) for _ in range(3))
    expected, _ = onnx_pass.forward([Piece(whole, 0, _TEXT)])
    at = 0
    for size in (1, 2, 3, 61, 1, 70, 1, 61):
        pieces = [Piece(beside, at, _TEXT[at : at + size % 5]), Piece(mine, at, _TEXT[at : at + size])]
        pieces = [piece for piece in pieces if len(piece)]
        hidden, _ = onnx_pass.forward(pieces)
        assert np.array_equal(hidden[-size:], expected[at : at + size])
        at += size
    assert np.array_equal(mine.read([0, 1], 0, at), whole.read([0, 1], 0, at))
    assert np.array_equal(mine.features[:at], whole.features[:at]) and mine.features[:at].all()
    logits = onnx_pass.logits([expected])
    assert np.array_equal(np.concatenate([onnx_pass.logits([row[None]]) for row in expected[:5]]), logits[:5])


@pytest.mark.parametrize(("at", "more"), [(3, 0), (62, 0), (100, 0), (62, 150)])
def test_the_right_path_of_a_tree_is_that_of_a_chain(onnx_pass: OnnxPass, at: int, more: int) -> None:
    whole = onnx_pass.cache_shape.new_cache(len(_TEXT))
    expected, _ = onnx_pass.forward([Piece(whole, 0, _TEXT)])
    tree = whole.resized(at + more + 8, at)
    wrong, right = _TEXT[0], _TEXT[at : at + 5]
    nodes = [wrong, right[0], *[wrong] * more, wrong, right[1], right[2], wrong]
    parents, last = [0, 0, *[2] * more, 1, 2, 4 + more, 4 + more], 4 + more
    hidden, _ = onnx_pass.forward([Piece(tree, at, (), nodes, parents)])
    path = [1, last - 1, last]
    assert np.array_equal(hidden[path], expected[at : at + 3])
    tree.keep(at, path)
    assert np.array_equal(tree.read([0, 1], 0, at + 3), whole.read([0, 1], 0, at + 3))
    assert np.array_equal(onnx_pass.forward([Piece(tree, at + 3, right[3:])])[0], expected[at + 3 : at + 5])


def test_equality_is_tried_once(onnx_pass: OnnxPass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(invariance, "_TREES", (5, 60, 190))
    monkeypatch.setattr(invariance, "_TOKENS", 260)
    invariance.settle(onnx_pass, "a model")
    assert onnx_pass.batch_invariant
    onnx_pass.batch_invariant = False
    monkeypatch.setattr(invariance, "is_invariant", lambda *_: pytest.fail("it was tried again"))
    invariance.settle(onnx_pass, "a model")
    assert onnx_pass.batch_invariant
    [kept] = (tmp_path / "invariance").iterdir()
    for damaged in ("", "[" * 100_000, '{"row_multiple": 2.0}', '{"row_multiple": 3}'):
        kept.write_text(damaged)
        monkeypatch.setattr(invariance, "is_invariant", lambda target, *_: target.row_multiple == 4)
        invariance.settle(onnx_pass, "a model")
        assert onnx_pass.row_multiple == 4


def test_sums_in_another_order_are_found_out(onnx_pass: OnnxPass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_server.engine.onnx_attention.depths", lambda parents: [1] * len(parents))
    assert not invariance.is_invariant(onnx_pass, 64, 512)
