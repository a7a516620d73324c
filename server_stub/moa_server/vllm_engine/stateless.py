"""An engine on what any release of vLLM offers in public: requests that keep nothing, and log-probabilities of prompts.

Every step is a new request over the whole text; what was computed before is found in vLLM's prefix cache, but for part
of a block. There are no memory rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams, TokensPrompt

from moa_drafter.target import TargetFacts, target_facts
from moa_runtime.bundle import TOKENIZER_FILE, tokenizer_fingerprint
from moa_runtime.sequences import common_length
from moa_runtime.session.handshake import Fingerprints
from moa_runtime.session.sampling import Sampling
from moa_server.engine import Capabilities, EngineFacts, Float32, Outcome, StepRequest
from moa_server.requests import check_chain, check_request
from moa_server.sampling import choose
from moa_server.scheduler import MOST_SEQUENCES
from moa_server.target_settings import context_of, dtype_of
from moa_server.vllm_engine.limits import (
    BLOCK,
    MOST_DRAFTED,
    SPARE,
    block_bytes,
    check_device,
    check_memory,
    pool_blocks,
    refused,
)


class StatelessVllmEngine:
    """Implements :class:`moa_server.engine.Engine`: chains only, and no drafter. A greedy choice is the likeliest token
    that vLLM tells; a sampled one is made here, of the log-probabilities of all tokens, which takes vLLM long to tell.

    Args:
        max_context, dtype, device, cache_tokens: see :class:`moa_server.vllm_engine.engine.VllmEngine`.

    Raises:
        EngineError: what vLLM cannot run.
    """

    capabilities = Capabilities(trees=False, max_draft_tokens=MOST_DRAFTED, row_states=())
    drafter = None

    def __init__(
        self,
        target: TargetFacts,
        max_context: int | None = None,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        cache_tokens: int = 32768,
    ) -> None:
        self.fingerprints = Fingerprints(target.fingerprint, tokenizer_fingerprint(target.folder / TOKENIZER_FILE), "")
        self.vocab_size, self.stop_tokens = int(target.config.vocab_size), target.stop_tokens
        self.max_context = context_of(target, max_context, spare=SPARE)
        self.forwards = 0
        self._texts: dict[int, list[int]] = {}
        kind, blocks = dtype_of(dtype, torch.device(device)), pool_blocks(cache_tokens, self.max_context)
        check_memory(target, kind, blocks, torch.device(device))
        size, self._bound = block_bytes(target, kind), blocks * BLOCK
        self.facts = EngineFacts(str(kind).removeprefix("torch."), torch.device(device).type, False, blocks * size)
        self._worker = ThreadPoolExecutor(1, "target")
        settings = {
            "dtype": self.facts.dtype,
            "seed": 0,
            "skip_tokenizer_init": True,
            "max_model_len": self.max_context + SPARE,
            "max_num_seqs": MOST_SEQUENCES + 1,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": (blocks + 1) * size,  # vLLM keeps one for nothing
            "enable_prefix_caching": True,
            "enforce_eager": self.facts.device == "cpu",
            "max_logprobs": -1,
            "use_tqdm_on_load": False,
        }
        try:
            self._llm = self._worker.submit(lambda: LLM(str(target.folder), **settings)).result()
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            self._worker.shutdown()
            raise refused(target, error) from error

    @classmethod
    def load(cls, target_name: str, **settings: Any) -> StatelessVllmEngine:
        """Load a target; for the settings see the class. Raises MoaError: what cannot be found or run."""
        check_device(settings.get("device", "cpu"))
        return cls(target_facts(target_name), **settings)

    @property
    def cache_use(self) -> tuple[int, int]:
        """What was processed of each sequence; vLLM may have forgotten some of it."""
        return min(sum(map(len, self._texts.values())), self._bound), self._bound

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        """See :meth:`moa_server.engine.Engine.held`; but for part of a block, if vLLM still has it."""
        return common_length(self._texts.get(sequence, []), prefix)

    def release(self, sequence: int) -> None:
        """See :meth:`moa_server.engine.Engine.release`."""
        self._texts.pop(sequence, None)

    def close(self) -> None:
        """See :meth:`moa_server.engine.Engine.close`."""
        self._worker.shutdown()
        self._texts.clear()
        del self._llm

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        """See :meth:`moa_server.engine.Engine.step`.

        Raises:
            ValueError: a request without a prefix, a draft where nothing is chosen, a tree, memory rows, or more tokens
                than a context has.
        """
        for request in requests:
            check_request(request, has_drafter=False)
            check_chain(request, MOST_DRAFTED, self.max_context)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._step, requests)

    def _step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        given = self._generate(requests)
        return [self._outcome(request, each) for request, each in zip(requests, given, strict=True)]

    def _generate(self, requests: Sequence[StepRequest], *, cached: bool = True) -> list[Any]:
        prompts = [TokensPrompt(prompt_token_ids=[*request.prefix, *request.draft]) for request in requests]
        self.forwards += 1
        return self._llm.generate(prompts, [_params(request, cached=cached) for request in requests], use_tqdm=False)

    def _outcome(self, request: StepRequest, given: Any) -> Outcome:
        if request.sampling is None:
            self._texts[request.sequence] = list(request.prefix)
            return Outcome()
        accepted = 0
        for token in request.draft:
            if token != self._choice(request, given, accepted):
                break
            accepted += 1
        self._texts[request.sequence] = [*request.prefix, *request.draft[:accepted]]
        return Outcome(tuple(range(accepted)), self._choice(request, given, accepted))

    def _choice(self, request: StepRequest, given: Any, ahead: int) -> int:
        """The target's token ``ahead`` of the prefix."""
        assert request.sampling is not None
        position, own = len(request.prefix) + ahead, given.outputs[0]
        behind_all = ahead == len(request.draft)
        if behind_all and not request.sampling.temperature:
            return int(own.token_ids[0])
        if not behind_all and position <= given.num_cached_tokens:  # nothing was computed there, and garbage is told
            given = self._generate([request], cached=False)[0]
        told = own.logprobs[0] if behind_all else given.prompt_logprobs[position]
        return choose(self._logits(told), request.sampling, position)

    def _logits(self, told: Any) -> Float32:
        """As good as logits: they differ by a constant. Those that were not told cannot be chosen."""
        logits = np.full(self.vocab_size, -np.inf, np.float32)
        for token, each in told.items():
            logits[token] = each.logprob
        return logits


def _params(request: StepRequest, *, cached: bool) -> SamplingParams:
    sampling = request.sampling or Sampling()
    told = -1 if sampling.temperature else 1  # -1: of all tokens
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}
    if request.draft:
        settings["prompt_logprobs"] = told
    if sampling.temperature:
        settings["logprobs"] = told
    if "skip_reading_prefix_cache" in getattr(SamplingParams, "__struct_fields__", ()):
        settings["skip_reading_prefix_cache"] = not cached
    return SamplingParams(**settings)
