"""Reading GGUF files without ggml's library: numbers equal to its own to the bit, and damage."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

from moa_decoder.errors import TargetError
from moa_decoder.gguf_blocks import bits_of, dense_rows, matrix_of
from moa_decoder.gguf_file import GgufFile
from moa_decoder.gguf_weights import GgufWeights
from moa_server.engine.onnx_pass import OnnxPass
from moa_server.engine.target_pass import Piece
from support.drafter.gguf_files import write_gguf
from support.refusals import refused

#: Bits by type, and the bytes of a block that hold float16 scales.
BITS = {"F32": 32, "F16": 32, "BF16": 32, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q6_K": 8}
BITS["Q8_0"] = 8
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES["Q8_0"] = (0,)


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Blocks of any codes with scales between -1 and 1, uint8 ``[rows, bytes]``."""
    numbers = np.random.default_rng(0)
    if kind.name not in SCALES:
        return gguf.quantize(numbers.standard_normal((rows, columns), np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = numbers.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in SCALES[kind.name]:
        scales = numbers.uniform(-1, 1, (rows, columns // block, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_tensor(path: Path, kind: GGMLQuantizationType, blocks: np.ndarray) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(["a", "of the list", "é"])
    writer.add_array("scores", [1.5, -2.0])
    writer.add_tensor("x", blocks, raw_dtype=None if kind.name in ("F32", "F16") else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", BITS)
def test_numbers_are_those_of_ggml(tmp_path, name):
    kind = GGMLQuantizationType[name]
    blocks = random_blocks(kind, 6, 512)
    tensor = GgufFile(write_tensor(tmp_path / "x.gguf", kind, blocks)).tensors["x"]
    wanted = gguf.dequantize(blocks, kind)
    assert np.array_equal(dense_rows(tensor).view(np.uint32), wanted.view(np.uint32))
    assert np.array_equal(dense_rows(tensor, np.array([4, 1])), wanted[[4, 1]])
    matrix = matrix_of(tensor)
    assert matrix.bits == bits_of(tensor) == BITS[name] and (matrix.outputs, matrix.inputs) == (6, 512)
    assert np.abs(matrix.dense() - wanted).max() <= 1e-6 * np.abs(wanted).max()
    assert name in ("Q4_1", "Q4_K") or np.array_equal(matrix.dense(), wanted)
    assert np.array_equal(matrix.rows(np.array([4, 1])).dense(), matrix.dense()[[4, 1]])


def test_a_type_without_a_reader_and_scales_that_are_not_finite_are_refused(tmp_path):
    other = np.zeros((1, 84), np.uint8)
    with refused("unsupported_type", TargetError, "Q2_K"):
        matrix_of(GgufFile(write_tensor(tmp_path / "x.gguf", GGMLQuantizationType.Q2_K, other)).tensors["x"])
    infinite = np.full((1, 34), 0x7C, np.uint8)
    with refused("damaged", TargetError):
        matrix_of(GgufFile(write_tensor(tmp_path / "y.gguf", GGMLQuantizationType.Q8_0, infinite)).tensors["x"])


def test_weights_are_those_of_the_checkpoint(tiny_target, tmp_path):
    """In one file or three, with queries and keys back in halves."""
    state = load_file(tiny_target / "model.safetensors")
    for count in (1, 3):
        weights = GgufWeights(write_gguf(tiny_target, tmp_path / f"{count}.gguf", parts=count))
        for role, name in {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "down": "mlp.down_proj"}.items():
            assert np.array_equal(weights.matrix(2, role).dense(), state[f"model.layers.2.{name}.weight"])
        assert np.array_equal(weights.vector(1, "mlp_norm"), state["model.layers.1.post_attention_layernorm.weight"])
        assert np.array_equal(weights.head().dense(), state["lm_head.weight"])
        assert np.array_equal(weights.last_norm(), state["model.norm.weight"])
        assert np.array_equal(weights.embed([7, 3]), state["model.embed_tokens.weight"][[7, 3]])
        assert np.array_equal(weights.embedding().dense()[[7, 3]], weights.embed([7, 3]))
    checkpoint = {name: numbers for name, _, numbers in weights.checkpoint()}
    assert checkpoint.keys() == state.keys()
    for name, shape, first in weights.checkpoint(first_rows=True):
        assert np.array_equal(checkpoint[name], state[name]) and shape == state[name].shape
        assert np.array_equal(first, state[name][:1])
    rounded = GgufWeights(write_gguf(tiny_target, tmp_path / "r.gguf"), bits=4)
    assert (rounded.matrix(0, "q").bits, rounded.head().bits, weights.bits) == (4, 8, 32)
    layer = weights.spec.layers[3]
    assert (layer.heads, layer.kv_heads, layer.head_dim, len(weights.spec.layers)) == (4, 2, 16, 4)
    assert weights.metadata["tokenizer.ggml.tokens"].read()[1] == "<|im_start|>"
    other = tmp_path / "other.gguf"
    other.write_bytes((tmp_path / "1.gguf").read_bytes().replace(b"<|im_start|>", b"\xff|im_start|>", 1))
    with refused("damaged", TargetError):
        GgufWeights([other]).metadata["tokenizer.ggml.tokens"].read()
    with refused("weights_differ", TargetError, "blk.0.attn_norm.weight"):
        GgufWeights(write_gguf(tiny_target, tmp_path / "less.gguf", change=lambda t: t.pop("blk.0.attn_norm.weight")))


def test_a_file_of_several_types_gives_the_pass_its_numbers(tiny_target, tmp_path):
    """As files in 4 bits are: with values and the output of feed-forwards in 8."""
    kind = GGMLQuantizationType
    kinds = {"attn_v": kind.Q5_0, "ffn_down": kind.Q8_0, "norm": kind.F32, "blk": kind.Q4_1, "token_embd": kind.Q8_0}
    file = write_gguf(tiny_target, tmp_path / "x.gguf", kinds=kinds)
    assert GgufWeights(file).bits == 4
    logits, types = [], []
    for bits in (None, 32):
        target_pass = OnnxPass(GgufWeights(file, bits), threads=1)
        hidden, _ = target_pass.forward([Piece(target_pass.cache_shape.new_cache(64), 0, range(40))])
        logits.append(target_pass.logits([hidden]))
        types.append(target_pass.dtype)
    assert types == ["int4", "float32"]
    assert np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1] > 0.99


def test_damage_is_told_in_a_sentence(tmp_path):
    """A file cut anywhere, and any bytes of the header others: never another error."""
    whole = write_tensor(
        tmp_path / "x.gguf", GGMLQuantizationType.Q8_0, random_blocks(GGMLQuantizationType.Q8_0, 2, 64)
    )
    content, path = whole.read_bytes(), tmp_path / "damaged.gguf"
    for length in range(GgufFile(whole).tensors["x"].start + 2 * 68):
        path.write_bytes(content[:length])
        with refused("damaged", TargetError):
            GgufFile(path)
    chance = random.Random(0)
    for at in range(len(content) - 2 * 68):
        other = bytearray(content)
        other[at] = chance.randrange(256)
        other[at + 1 : at + chance.choice((1, 8))] = b"\xff" * chance.choice((0, 7))
        path.write_bytes(other)
        try:
            tensors = GgufFile(path).tensors.values()
        except TargetError as error:
            assert error.code in ("damaged", "unsupported_type") and "\n" not in str(error)
        else:
            assert all(tensor.blocks().size for tensor in tensors)
