"""Decoder-only models described by their features, with weights in 4, 8 or 32 bits, as ONNX graphs. No torch."""
