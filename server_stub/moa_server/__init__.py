"""The verifier: runs the target, decides every committed token, hands out memory rows."""

import moa_runtime  # noqa: F401  which switches onnxruntime's telemetry off before its import
