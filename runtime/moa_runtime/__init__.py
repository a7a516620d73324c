"""The on-device runtime of moa-edge: everything that ships to a device, without torch."""

import os

# onnxruntime's wheels send reports about the machine to Microsoft, and read this once, when they are imported. Here it
# precedes every import of theirs in our programs, which all import this package, and their child processes inherit it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
