"""The device half of an EAGLE-3 head for several conversations at once, in numpy and onnxruntime.

New pairs of all conversations share the products; each conversation attends to its own in a graph without weights, as
in :mod:`moa_server.drafting.onnx_drafter`. Drafts do not decide the text, so matrices are rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from moa_decoder.graph_builder import GraphBuilder, Port, Positions, Residual, rotation_tables, scaled
from moa_decoder.weights import DecoderWeights
from moa_drafter.config import Eagle3Config
from moa_drafter.drafter_layers import DrafterLayer, in_bits, layer_spec
from moa_drafter.drafter_weights import DrafterWeights
from moa_runtime.backends.base import Float32
from moa_runtime.backends.eagle3 import Eagle3Inputs, Eagle3Result
from moa_server.drafting.step_graphs import StepAttention
from moa_server.engine.onnx_sessions import session_options

_BITS = 8


class OnnxEagle3:
    """Computes what :class:`moa_drafter.architectures.eagle3.Eagle3Module` computes, for several passes at once.
    Implements :class:`moa_server.drafting.batched_eagle3.BatchedEagle3Pass`.

    Args:
        drafter: of the architecture "eagle3".
        target: provides the embedding, unless the head has its own.
        threads: that compute; all processors if None.
        top_k: candidates per query, at most the draft vocabulary.
        bits: of the head's matrices.
    """

    def __init__(
        self,
        drafter: DrafterWeights,
        target: DecoderWeights,
        threads: int | None = None,
        *,
        top_k: int,
        bits: int = _BITS,
    ) -> None:
        config = drafter.config
        assert isinstance(config, Eagle3Config)
        dims, rotary = config.decoder, config.rotary
        self.top_k = min(top_k, config.draft_vocab_size)
        self.kv_shape, self.hidden_size = (dims.num_kv_heads, dims.head_dim), dims.hidden_size
        self._config, self._rotary, self._threads, self._target = config, rotary, threads, target
        self._own_embedding = drafter.array("embed_tokens.weight") if config.own_embedding else None
        self._tokens = drafter.array("draft_to_target")
        plain = layer_spec(dims, config.rope_theta)
        self._spec = replace(plain, rotary=rotary, query_key_norm="head" if config.qk_norm else "none")
        layer = DrafterLayer(drafter, "layer", bits)
        self._before, self._after = self._before_attention(drafter, layer), self._after_attention(drafter, layer)
        self._head = self._candidates(drafter, bits)
        self._attention = StepAttention(self._spec, threads)

    def __call__(self, inputs: Eagle3Inputs) -> Eagle3Result:
        """See :class:`moa_runtime.backends.eagle3.Eagle3Pass`."""
        return self.together([inputs])[0]

    def together(self, passes: Sequence[Eagle3Inputs]) -> list[Eagle3Result]:
        """See :class:`moa_server.drafting.batched_eagle3.BatchedEagle3Pass`."""
        counts, asked = ([len(getattr(each, name)) for each in passes] for name in ("tokens", "queries"))
        firsts = np.cumsum([0, *counts[:-1]])
        queries = np.concatenate([first + each.queries for first, each in zip(firsts, passes, strict=True)])
        cosines, sines = rotation_tables(self._rotary, np.concatenate([each.positions for each in passes]))
        fed: dict[str, Any] = {
            "embedded": self._embedded(np.concatenate([each.tokens for each in passes])),
            "features": np.concatenate([each.features for each in passes]),
            **{"cosines": cosines, "sines": sines, "indices": np.arange(len(cosines))[None]},
            **{"asked": queries, "query_indices": queries[None]},
        }
        q, k, v, residual = self._before.run(["queries", "keys", "values", "residual"], fed)
        of_queries, of_pairs = np.cumsum(asked)[:-1], np.cumsum(counts)[:-1]
        keys, values = (np.split(half.reshape(-1, *self.kv_shape), of_pairs) for half in (k, v))
        mixed = []
        for each, own, new_keys, new_values in zip(passes, np.split(q, of_queries), keys, values, strict=True):
            cached = np.ascontiguousarray(each.self_keys), np.ascontiguousarray(each.self_values)
            mixed.append(self._attention(own, [cached, (new_keys, new_values)], each.self_mask[each.queries]))
        [estimates] = self._after.run(["estimates"], {"mixed": np.concatenate(mixed), "residual": residual})
        indices, logprobs = self._head.run(["indices", "logprobs"], {"estimates": estimates})
        parts = [np.split(each, of_queries) for each in (self._tokens[indices], logprobs, estimates)]
        return [Eagle3Result(*each) for each in zip(parts[0], parts[1], keys, values, parts[2], strict=True)]

    def _embedded(self, tokens: NDArray[np.int64]) -> Float32:
        if self._own_embedding is not None:
            rows: Float32 = self._own_embedding[tokens]
            return rows
        embedded, scale = self._target.embed(tokens.tolist()), self._target.spec.embedding_scale
        return embedded if scale == 1 else embedded / np.float32(scale)  # heads are trained on the matrix as it is

    # -- graphs

    def _before_attention(self, drafter: DrafterWeights, layer: DrafterLayer) -> ort.InferenceSession:
        """Norms, queries, keys and values."""
        spec, size, graph = self._spec, self.hidden_size, GraphBuilder(self._config.rms_norm_eps)
        normed = graph.norm("features", drafter.array("layer.hidden_norm.weight"))
        embedded = graph.norm("embedded", drafter.array("layer.input_layernorm.weight"))
        x = graph.op("Concat", embedded, normed, axis=-1)
        keys, values = graph.products(x, [layer.matrix(0, "k"), layer.matrix(0, "v")])
        residual = normed if self._config.norm_before_residual else "features"
        graph.output("residual", graph.op("Gather", residual, "asked", axis=0))
        # The norm's weight takes the scale of attention, or the matrix.
        scale = 1.0 if self._config.qk_norm else spec.attention_scale
        queries = graph.product(graph.op("Gather", x, "asked", axis=0), scaled(layer.matrix(0, "q"), scale))
        if self._config.qk_norm:
            weight = drafter.array("layer.self_attn.q_norm.weight") * np.float32(spec.attention_scale)
            queries = graph.heads_norm(queries, spec, spec.heads, weight)
            keys = graph.heads_norm(keys, spec, spec.kv_heads, drafter.array("layer.self_attn.k_norm.weight"))
        for name, rows, heads, indices in (
            ("queries", queries, spec.heads, "query_indices"),
            ("keys", keys, spec.kv_heads, "indices"),
        ):
            places = Positions(indices, "cosines", "sines")
            graph.output(name, graph.rotary(rows, heads, spec.head_dim, self._rotary, places))
        graph.output("values", values)
        table: Port = (np.float32, ["pairs", len(self._rotary.frequencies)])
        inputs: dict[str, Port] = {
            **dict.fromkeys(("embedded", "features"), (np.float32, ["pairs", size])),
            **{"cosines": table, "sines": table, "indices": (np.int64, [1, "pairs"])},
            **{"asked": (np.int64, ["asked"]), "query_indices": (np.int64, [1, "asked"])},
        }
        outputs: dict[str, Port] = {
            "queries": (np.float32, ["asked", spec.heads * spec.head_dim]),
            **dict.fromkeys(("keys", "values"), (np.float32, ["pairs", spec.kv_heads * spec.head_dim])),
            "residual": (np.float32, ["asked", size]),
        }
        return graph.session(inputs, outputs, session_options(self._threads))

    def _after_attention(self, drafter: DrafterWeights, layer: DrafterLayer) -> ort.InferenceSession:
        """What follows attention, up to what takes the place of features."""
        graph, spec = GraphBuilder(self._config.rms_norm_eps), self._spec
        residual = graph.after_attention("mixed", Residual("residual"), spec, layer, 0)
        norm = drafter.array("norm.weight")
        estimates = graph.residual_norm(residual, norm)[0] if self._config.norm_output else graph.whole(residual)
        graph.output("estimates", estimates)
        port: Port = (np.float32, ["asked", self.hidden_size])
        inputs: dict[str, Port] = {"mixed": (np.float32, ["asked", spec.heads * spec.head_dim]), "residual": port}
        return graph.session(inputs, {"estimates": port}, session_options(self._threads))

    def _candidates(self, drafter: DrafterWeights, bits: int) -> ort.InferenceSession:
        """The head's own output matrix, up to the candidates' indices in the draft vocabulary."""
        graph = GraphBuilder(self._config.rms_norm_eps)
        norm = drafter.array("norm.weight")
        hidden = "estimates" if self._config.norm_output else graph.norm("estimates", norm)
        head = scaled(in_bits(drafter.array("lm_head.weight"), bits), self._config.sharpness)
        candidates = graph.candidates(graph.product(hidden, head), self.top_k)
        for name, value in zip(("indices", "logprobs"), candidates, strict=True):
            graph.output(name, value)
        shape: Sequence[int | str] = ["asked", self.top_k]
        outputs: dict[str, Port] = {"indices": (np.int64, shape), "logprobs": (np.float32, shape)}
        inputs: dict[str, Port] = {"estimates": (np.float32, ["asked", self.hidden_size])}
        return graph.session(inputs, outputs, session_options(self._threads))
