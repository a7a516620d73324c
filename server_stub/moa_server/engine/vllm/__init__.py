"""vLLM behind the engine's contract: each sequence is one of its requests, which waits between steps.

==================  ==============================================  =======================================
module              knows                                           must not know
==================  ==============================================  =======================================
:mod:`environment`  which release is tested                         how it is used
:mod:`limits`       sizes                                           everything else
:mod:`engine`       the contract, memory rows                       vLLM
:mod:`sequences`    what each sequence holds, who gives way         vLLM, blocks
:mod:`work`         how verdicts follow from tokens that come back  vLLM, memory
:mod:`core`         vLLM's engine core and its configuration        the contract, drafters
:mod:`scheduler`      vLLM's scheduler                                what a request is for
:mod:`proposer`     nothing                                         everything
:mod:`sampler`      logits, and how the target chooses              requests' text, memory
:mod:`layout`       how keys and values lie in memory               vLLM, who asks
==================  ==============================================  =======================================

Only :mod:`core`, :mod:`scheduler` and :mod:`sampler` import vLLM, :func:`limits.check_device` when it is called, and
:func:`environment.prepare` comes before them. What vLLM must find in the environment is known to
:mod:`moa_drafter.vllm_environment`, for training writes with vLLM too.
"""
