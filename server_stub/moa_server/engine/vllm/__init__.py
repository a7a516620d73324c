"""vLLM as an engine: each sequence is one of its requests, which waits between steps.

:mod:`core`, :mod:`scheduler` and :mod:`sampler` import vLLM; :func:`moa_server.engine.load.prepare_vllm` runs before.
"""
