"""Decoder-only models described by their features, with weights in 4, 8 or 32 bits, as ONNX graphs. No torch."""

import moa_runtime  # noqa: F401  which switches onnxruntime's telemetry off before its import
