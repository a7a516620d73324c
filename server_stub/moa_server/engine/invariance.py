"""Whether each row of a pass is the same to the bit whatever stands beside it, shown by trying on this processor."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import platform
import random
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from moa_decoder.graph_builder import GraphBuilder
from moa_decoder.matrix import GROUP, Matrix
from moa_runtime.atomic_file import replace_private
from moa_runtime.paths import cache_dir
from moa_server.engine.base import EngineError, Float32
from moa_server.engine.onnx_pass import OnnxPass
from moa_server.engine.target_pass import Cache, Piece, TargetPass

_log = logging.getLogger(__name__)

#: Layers that are run: the first one, and one whose input is no embedding.
_LAYERS = 2
#: Tokens of the text; past a chunk of prefill, and several blocks of keys.
_TOKENS, _CHUNK = 620, 512
#: Sizes of pieces, over and over, and where trees hang: at both sides of a block's edge.
_PIECES = (1, 2, 3, 4, 5, 7, 1, 8, 12, 16, 30, 64, 1, 100)
_TREES = (5, 60, 64, 127, 190, 560)
#: Nodes of a tree, and of the largest ones that our attention computes equally.
_TREE_SIZE, _WIDE_TREE_SIZE = 62, 400
#: Rows that products may have to be padded to a multiple of.
_PADDINGS = (1, 2, 4, 8)


def settle(target: OnnxPass, fingerprint: str) -> None:
    """Set :attr:`OnnxPass.row_multiple` and :attr:`OnnxPass.batch_invariant`.

    The answer for a model, its bits, this processor and these releases is kept in the cache folder, so that later
    starts need not try again.

    Args:
        fingerprint: of the model.

    Raises:
        EngineError: ``wrong_results`` if this processor's products in 4 or 8 bits overflow; ``not_finite`` if the
            weights give no finite numbers.
    """
    facts = {
        "processor": _processor(),
        "threads": target.threads,
        "target": fingerprint,
        "bits": target.dtype,
        "onnxruntime": ort.__version__,
        "moa-edge": version("moa-edge"),
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_dir() / "invariance" / f"{name}.json"
    multiple = _kept(path)
    if multiple is None:
        if target.dtype != "float32" and not products_are_exact(4 if target.dtype == "int4" else 8):
            text = f"this processor's products in {target.dtype} overflow: start with --dtype float32"
            raise EngineError(text, code="wrong_results")
        _check_finite(target)
        multiple = next((each for each in _PADDINGS if _holds(target, each)), 0)
        _keep(path, {**facts, "row_multiple": multiple})
    target.batch_invariant, target.row_multiple = multiple > 0, multiple or _PADDINGS[0]
    if not multiple:
        _log.info("on this processor the target's choices may depend, in the last bits, on what else is in a step")


def _check_finite(target: OnnxPass) -> None:
    """Raise EngineError for weights whose results are not numbers: every answer would be the token 0."""
    text = list(range(min(8, target.spec.vocab_size, target.spec.max_context)))
    states = target.forward([Piece(target.cache_shape.new_cache(len(text)), 0, text)])[0]
    if not (np.isfinite(states).all() and np.isfinite(target.logits([states])).all()):
        raise EngineError(
            "the target's results are not finite numbers, so its weights are damaged: fetch the target again",
            code="not_finite",
        )


def _holds(target: OnnxPass, multiple: int) -> bool:
    target.row_multiple = multiple
    return is_invariant(target, target.spec.vocab_size, target.spec.max_context, (_TREE_SIZE, _WIDE_TREE_SIZE))


def _processor() -> str:
    """Name and features of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    changing = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "bogomips")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() not in changing)


def _kept(path: Path) -> int | None:
    try:
        multiple = json.loads(path.read_text(encoding="utf-8"))["row_multiple"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return multiple if type(multiple) is int and multiple in (0, *_PADDINGS) else None


def _keep(path: Path, facts: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_private(path, [json.dumps(facts, indent=2).encode()])
    except OSError as error:
        _log.info("the next start will try again whether rows are equal: %s", error)


def products_are_exact(bits: int) -> bool:
    """Compare products of the largest stored numbers with integers: 8-bit products overflow on some processors."""
    size = 8 * GROUP
    stored = np.full((4, 8, GROUP * bits // 8), 255, np.uint8)
    stored[1::2] = 0  # -128 or -8, beside the largest number
    matrix = Matrix(bits, stored, np.ones((4, 8), np.float32))
    rows = np.full((3, size), 127, np.float32)  # as 8 bits with the scale 1
    rows[1] = -127
    graph = GraphBuilder()
    graph.output("y", graph.product("x", matrix))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = graph.session({"x": (np.float32, ["n", size])}, {"y": (np.float32, ["n", 4])}, options)
    return bool(np.allclose(session.run(None, {"x": rows})[0], rows @ matrix.dense().T, rtol=1e-3))


def is_invariant(whole: Any, vocab_size: int, context: int, tree_sizes: Sequence[int] = (_TREE_SIZE,)) -> bool:
    """Run a text in large chunks, in small pieces beside another sequence, and in trees: are all states equal?

    Args:
        whole: a :class:`moa_server.engine.target_pass.TargetPass` with ``first_layers``, which are tried.
        context: positions that the target was made for.
        tree_sizes: nodes of the trees.
    """
    short = whole.first_layers(_LAYERS)
    rng = random.Random(4)
    text = [rng.randrange(vocab_size) for _ in range(min(_TOKENS, context))]
    cache = short.cache_shape.new_cache(len(text))
    chunks = [short.forward([Piece(cache, at, text[at : at + _CHUNK])])[0] for at in range(0, len(text), _CHUNK)]
    states = np.concatenate([np.asarray(chunk) for chunk in chunks])
    logits = _logits(short, chunks[0][:70])
    return (
        _same_in_pieces(short, text, cache, states)
        and all(
            _same_in_tree(short, text, at, size, cache, states, rng)
            for at in _TREES
            for size in tree_sizes
            if at < len(text)
        )
        and all(np.array_equal(_logits(short, chunks[0][at:end]), logits[at:end]) for at, end in _cut(len(logits)))
    )


def _logits(short: TargetPass, hidden: Any) -> Float32:
    return np.stack(list(short.logits([hidden])))


def _same_in_pieces(short: TargetPass, text: Sequence[int], cache: Cache, states: Float32) -> bool:
    mine, beside = short.cache_shape.new_cache(len(text)), short.cache_shape.new_cache(len(text))
    for index, (start, stop) in enumerate(itertools.chain(_cut(len(text)), [(0, min(_CHUNK, len(text)))])):
        pieces = [Piece(mine, start, text[start:stop])]
        if index % 3:
            pieces.insert(index % 2, Piece(beside, 0, text[stop - 1 : stop - 1 + index % 3]))
        hidden, _ = short.forward(pieces)
        first = 0 if pieces[0].cache is mine else len(pieces[0])
        if not np.array_equal(np.asarray(hidden)[first : first + stop - start], states[start:stop]):
            return False
    kept, expected = (np.asarray(each.read([0], 0, len(text))) for each in (mine, cache))
    return np.array_equal(kept, expected)


def _cut(length: int) -> Iterator[tuple[int, int]]:
    start = 0
    for size in itertools.cycle(_PIECES):
        if start >= length:
            return
        yield start, min(start + size, length)
        start += size


def _same_in_tree(
    short: TargetPass, text: Sequence[int], at: int, size: int, cache: Cache, states: Float32, rng: random.Random
) -> bool:
    """Compare a tree after the first ``at`` tokens that has the text itself as a path."""
    cache = cache.resized(at + size, at)
    right = text[at : at + 20]
    spine = sorted(rng.sample(range(size), len(right)))
    tokens = [rng.choice(text) for _ in range(size)]
    parents = [rng.randint(0, index) for index in range(size)]
    node = 0
    for index, token in zip(spine, right, strict=True):
        tokens[index], parents[index], node = token, node, index + 1
    hidden, _ = short.forward([Piece(cache, at, (), tokens, parents)])
    return np.array_equal(np.asarray(hidden)[spine], states[at : at + len(right)])
