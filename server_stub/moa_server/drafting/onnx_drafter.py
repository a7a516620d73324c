"""The device half of a Mixture of Attentions drafter for many sequences at once, in numpy and onnxruntime.

All that lies between two attentions is one graph; new tokens of all steps share its products, which take nearly all of
the time. Each step attends to its own caches in a graph without weights, so nothing is padded. Drafts do not decide the
text, so the drafter's matrices are rounded to 8 bits; the head has the target's own bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from moa_decoder.graph_builder import GraphBuilder, Port, Positions, Residual, rotation_tables, scaled
from moa_decoder.matrix import Matrix
from moa_decoder.spec import LayerSpec
from moa_decoder.weights import DecoderWeights, LayerMatrix
from moa_drafter.config import DrafterConfig, Eagle3Config
from moa_drafter.drafter_layers import device_layers, in_bits, last_norm, layer_spec
from moa_drafter.drafter_weights import DrafterWeights
from moa_runtime.backends.base import Bool, Float32, StepInputs, StepResult
from moa_server.drafting.batched_backend import BatchedBackend
from moa_server.drafting.batched_eagle3 import BatchedEagle3
from moa_server.drafting.onnx_eagle3 import OnnxEagle3
from moa_server.drafting.step_graphs import StepAttention
from moa_server.engine.onnx_sessions import session_options

#: Candidates for each node of a tree, as bundles have them.
TOP_K = 16
#: Bits of the drafter's own matrices, and of a head that the target has in float32.
_BITS = 8
_KEYS_VALUES: Sequence[LayerMatrix] = ("k", "v")
#: The cross-attention's number among the layers.
_CROSS = 1


def own_drafter(drafter: DrafterWeights | None, target: DecoderWeights, threads: int | None) -> BatchedBackend | None:
    """Make the backend of the verifier's own drafts; None without a drafter, and for other architectures than "moa" and
    "eagle3".

    Args:
        threads: that compute; all processors if None.
    """
    if drafter is not None and isinstance(drafter.config, Eagle3Config):
        return BatchedEagle3(OnnxEagle3(drafter, target, threads, top_k=TOP_K))
    if drafter is None or not isinstance(drafter.config, DrafterConfig):
        return None
    return OnnxDrafter(drafter, target, threads)


class OnnxDrafter(BatchedBackend):
    """Computes what :class:`moa_drafter.device_module.DeviceModule` computes, for several steps at once.

    Args:
        drafter: of the architecture "moa".
        target: provides embedding and head, and the last layers if the drafter ends with them.
        threads: that compute; all processors if None.
        top_k: candidates per query, at most the draft vocabulary.
        bits: of the drafter's matrices, and of the head if the target has it in float32.

    Raises:
        FitError: the drafter ends with layers of the target, which compute something else.
    """

    def __init__(
        self,
        drafter: DrafterWeights,
        target: DecoderWeights,
        threads: int | None = None,
        *,
        top_k: int = TOP_K,
        bits: int = _BITS,
    ) -> None:
        config = drafter.config
        assert isinstance(config, DrafterConfig)
        self.top_k = min(top_k, config.draft_vocab_size)
        self.kv_shape = (config.kv_heads, config.decoder.head_dim)
        self._target, self._threads = target, threads
        self._hidden, self._epsilon = config.decoder.hidden_size, config.rms_norm_eps
        self._spec = spec = layer_spec(config.decoder, config.rope_theta)
        self._tokens = drafter.array("draft_to_target")
        self._layers = device_layers(config, drafter, target, bits)
        # From this layer on only queries are computed: the other tokens only had to leave their keys and values.
        self._last = len(self._layers) - 1 if config.target_layers else 0
        head = target.head().rows(self._tokens)
        if head.bits == 32:
            head = in_bits(head.stored, bits)
        self._segments = [self._segment(number) for number in range(len(self._layers))]
        self._head = self._final(last_norm(config, drafter), scaled(head, config.sharpness))
        self._attention = StepAttention(spec, threads)

    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        """See :meth:`BatchedBackend.steps`."""
        firsts = np.cumsum([0, *(len(each.tokens) for each in inputs[:-1])])
        queries = np.concatenate([first + each.queries for first, each in zip(firsts, inputs, strict=True)])
        states = [_StepState(each, self._spec) for each in inputs]
        fed = self._first_inputs(inputs)
        for number, session in enumerate(self._segments):
            if number == self._last:
                fed |= {"asked": queries, "query_indices": queries[None]}
                for state in states:
                    state.only_queries()
            out = _run(session, fed)
            fed |= {"residual": out["next_residual"], "mixed": self._mixed(number, states, out)}
        out, ends = _run(self._head, fed), np.cumsum([len(each.queries) for each in inputs])[:-1]
        top_tokens = np.split(self._tokens[out["indices"]], ends)
        candidates = zip(top_tokens, np.split(out["logprobs"], ends), states, strict=True)
        return [StepResult(tokens, logprobs, *state.new()) for tokens, logprobs, state in candidates]

    def _first_inputs(self, inputs: Sequence[StepInputs]) -> dict[str, Any]:
        tokens = np.concatenate([each.tokens for each in inputs])
        x = self._target.embed(tokens.tolist())
        if self._target.spec.embedding_scale != 1:  # drafters are trained on the matrix as it is
            x = x / np.float32(self._target.spec.embedding_scale)
        assert self._spec.rotary is not None
        positions = np.concatenate([each.positions for each in inputs])
        cosines, sines = rotation_tables(self._spec.rotary, positions)
        rows = np.arange(len(tokens))[None]
        return {"residual": x, "cosines": cosines, "sines": sines, "indices": rows, "query_indices": rows}

    def _mixed(self, number: int, states: Sequence[_StepState], out: Mapping[str, Float32]) -> Float32:
        """Let each step's tokens attend in a layer -> ``[rows, heads * head_dim]``."""
        spec, row, token, parts = self._spec, 0, 0, []
        shape = spec.kv_heads, spec.head_dim
        for state in states:
            queries = out["queries"][row : row + state.attending]
            row += state.attending
            if number == _CROSS:
                parts.append(self._attention(queries, [state.rows[0]]))
                continue
            own = slice(token, token + state.count)
            token += state.count
            seen, mask = state.seen(*(out[name][own].reshape(-1, *shape) for name in ("keys", "values")))
            parts.append(self._attention(queries, seen, mask))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # -- graphs

    def _segment(self, number: int) -> ort.InferenceSession:
        """What lies between the attention of the layer before ``number`` and that of the layer itself."""
        graph = GraphBuilder(self._epsilon)
        inputs, residual = self._continued(graph, number)
        spec, weights, index = self._layers[number]
        assert spec.rotary is not None
        inputs["query_indices"] = (np.int64, [1, "attending"])
        inputs |= dict.fromkeys(("cosines", "sines"), (np.float32, ["tokens", spec.head_dim // 2]))
        outputs: dict[str, Port] = {"queries": (np.float32, ["attending", spec.heads * spec.head_dim])}
        normed, residual = graph.residual_norm(residual, weights.vector(index, "attention_norm"))
        if number != _CROSS:
            inputs["indices"] = (np.int64, [1, "tokens"])
            keys, values = graph.products(normed, [weights.matrix(index, name) for name in _KEYS_VALUES])
            places = Positions("indices", "cosines", "sines")
            graph.output("keys", graph.rotary(keys, spec.kv_heads, spec.head_dim, spec.rotary, places))
            graph.output("values", values)
            outputs |= dict.fromkeys(("keys", "values"), (np.float32, ["tokens", spec.kv_heads * spec.head_dim]))
        whole = graph.whole(residual)
        if number == self._last:
            inputs["asked"] = (np.int64, ["attending"])
            normed, whole = (graph.op("Gather", each, "asked", axis=0) for each in (normed, whole))
        queries = graph.product(normed, scaled(weights.matrix(index, "q"), spec.attention_scale))
        places = Positions("query_indices", "cosines", "sines")
        graph.output("queries", graph.rotary(queries, spec.heads, spec.head_dim, spec.rotary, places))
        graph.output("next_residual", whole)
        outputs["next_residual"] = (np.float32, ["attending", self._hidden])
        return graph.session(inputs, outputs, session_options(self._threads))

    def _final(self, norm: Float32 | None, head: Matrix) -> ort.InferenceSession:
        """What follows the last attention, up to the candidates' indices in the draft vocabulary."""
        graph = GraphBuilder(self._epsilon)
        inputs, residual = self._continued(graph, len(self._layers))
        hidden = graph.whole(residual) if norm is None else graph.residual_norm(residual, norm)[0]
        logits = graph.product(hidden, head)
        for name, value in zip(("indices", "logprobs"), graph.candidates(logits, self.top_k), strict=True):
            graph.output(name, value)
        shape: Sequence[int | str] = ["attending", self.top_k]
        outputs: dict[str, Port] = {"indices": (np.int64, shape), "logprobs": (np.float32, shape)}
        return graph.session(inputs, outputs, session_options(self._threads))

    def _continued(self, graph: GraphBuilder, number: int) -> tuple[dict[str, Port], Residual]:
        """The inputs of what follows the attention of the layer before ``number``, and the residual stream."""
        inputs: dict[str, Port] = {"residual": (np.float32, ["rows", self._hidden])}
        residual = Residual("residual")
        if number == 0:
            return inputs, residual
        spec, weights, index = self._layers[number - 1]
        inputs["mixed"] = (np.float32, ["rows", spec.heads * spec.head_dim])
        return inputs, graph.after_attention("mixed", residual, spec, weights, index)


def _run(session: ort.InferenceSession, fed: Mapping[str, Any]) -> dict[str, Any]:
    """Run a session on those of the arrays that it takes; return its outputs by name."""
    names = [port.name for port in session.get_outputs()]
    taken = {port.name: fed[port.name] for port in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


class _StepState:
    """The inputs of a step, and the new keys and values of its layers.

    Args:
        spec: of every layer.

    Attributes:
        count: new tokens; ``attending`` of them are computed in the current layer.
        rows: memory rows by layer, the cross-attention's first.
    """

    def __init__(self, inputs: StepInputs, spec: LayerSpec) -> None:
        self._inputs = inputs
        self.count = self.attending = len(inputs.tokens)
        self._mask = inputs.self_mask
        self._cached = _by_layer(inputs.self_keys, inputs.self_values, spec.kv_heads)
        self.rows = _by_layer(inputs.memory_keys, inputs.memory_values, spec.kv_heads)
        self._new: list[tuple[Float32, Float32]] = []

    def only_queries(self) -> None:
        """The queries alone attend from now on."""
        self.attending, self._mask = len(self._inputs.queries), self._inputs.self_mask[self._inputs.queries]

    def seen(self, keys: Float32, values: Float32) -> tuple[list[tuple[Float32, Float32]], Bool]:
        """Take the new tokens' keys and values in the next layer, ``[T, kv_heads, head_dim]``; return what tokens
        attend to there, and their mask, for :class:`StepAttention`.

        In the target's own layers, memory rows stand in place of the first tokens. Without any row there is one of
        zeros, which is left out, because a key of zeros would still take its share of attention.
        """
        number = len(self._new)
        self._new.append((keys, values))
        parts = list(zip(self._cached[number], (keys, values), strict=True))
        if number and self.rows[0][0][0].any():
            rows = self.rows[number]
            parts = [_in_place(given, *each) for given, each in zip(rows, parts, strict=True)]
        return list(zip(*parts, strict=True)), self._mask

    def new(self) -> tuple[Float32, Float32]:
        """Return the cache entries of the new tokens, ``[T, layers * kv_heads, head_dim]`` each."""
        if len(self._new) == 1:
            return self._new[0]
        keys, values = (np.concatenate(half, axis=1) for half in zip(*self._new, strict=True))
        return keys, values


def _in_place(rows: Float32, cached: Float32, own: Float32) -> tuple[Float32, Float32]:
    """Put rows in place of the first of the cached and then the new tokens, which are at least as many."""
    return np.concatenate((rows, cached[len(rows) :])), own[max(0, len(rows) - len(cached)) :]


def _by_layer(keys: Float32, values: Float32, heads: int) -> list[tuple[Float32, Float32]]:
    """Split ``[n, layers * heads, head_dim]`` into ``[n, heads, head_dim]`` for each layer."""
    count = keys.shape[1] // heads
    halves = ([np.ascontiguousarray(part) for part in np.split(half, count, axis=1)] for half in (keys, values))
    return list(zip(*halves, strict=True))
