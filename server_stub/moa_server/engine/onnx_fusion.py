"""Features of an EAGLE-3 head on a processor: the head's server half in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moa_decoder.graph_builder import GraphBuilder, Port
from moa_decoder.matrix import Matrix
from moa_drafter.config import Eagle3Config
from moa_drafter.drafter_weights import DrafterWeights
from moa_server.engine.base import Float32
from moa_server.engine.onnx_sessions import session_options


class OnnxFusion:
    """Computes :meth:`moa_drafter.architectures.eagle3.Eagle3Drafter.features` in float32. Implements
    :class:`moa_server.engine.target_pass.Fusion`.

    Args:
        drafter: of the architecture "eagle3", with the layers of its target.
        threads: that compute; all processors if None.
    """

    def __init__(self, drafter: DrafterWeights, threads: int | None = None) -> None:
        config = drafter.config
        assert isinstance(config, Eagle3Config)
        self.inner_layers, self.size = config.row_reads.inner_layers, config.decoder.hidden_size
        graph, self._names = GraphBuilder(config.rms_norm_eps), [f"state_{n}" for n in range(config.inputs)]
        parts = list(self._names)
        if config.fc_norm:
            parts = [graph.norm(part, drafter.array(f"fc_norm.{n}.weight")) for n, part in enumerate(parts)]
        joined = graph.op("Concat", *parts, axis=-1)
        if config.norm_before_fc:
            joined = graph.norm(joined, drafter.array("input_norm.weight"))
        graph.output("features", graph.product(joined, Matrix(32, drafter.array("fc.weight"))))
        port: Port = (np.float32, ["tokens", self.size])
        self._session = graph.session(dict.fromkeys(self._names, port), {"features": port}, session_options(threads))

    def __call__(self, states: Sequence[Float32]) -> Float32:
        """See :class:`moa_server.engine.target_pass.Fusion`."""
        features: Float32 = self._session.run(["features"], dict(zip(self._names, states, strict=True)))[0]
        return features
