"""What many sessions at once cost the verifier."""

#: How a client has its questions answered, see :mod:`moa_bench.server.modes`.
MODES = ("auto", "device", "server", "stream")
