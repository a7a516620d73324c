"""vLLM as an engine: each sequence is one of its requests, which waits between steps.

===================  ================================================  =================================
module               contains                                          independent of
===================  ================================================  =================================
:mod:`environment`   the tested release                                its use
:mod:`engine`        the engine's contract, memory rows                vLLM
:mod:`sequences`     tokens of each sequence, progress of requests     vLLM, memory
:mod:`core`          vLLM's engine core and its configuration          the contract, drafters
:mod:`scheduler`     vLLM's scheduler, with parked requests            the purpose of requests
:mod:`sampler`       logits, and how the target chooses                requests' text, memory
:mod:`paged_cache`   sizes and memory layout of blocks                 vLLM, but for its platform
===================  ================================================  =================================

:mod:`core`, :mod:`scheduler` and :mod:`sampler` import vLLM, and :func:`paged_cache.check_device` when it is called;
:func:`environment.prepare` must run before. :mod:`moa_drafter.vllm_environment` knows the environment variables of
vLLM, which training uses too.
"""
