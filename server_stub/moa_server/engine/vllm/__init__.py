"""vLLM as an engine: each sequence is one of its requests, which waits between steps.

:mod:`core`, :mod:`scheduler` and :mod:`sampler` import vLLM, and :func:`paged_cache.check_device` when it is called;
:func:`moa_server.engine.load.prepare_vllm` must run before.
"""
