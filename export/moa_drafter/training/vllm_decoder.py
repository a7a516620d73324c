"""The target's texts by vLLM, which batches continuously: a place that a text leaves is the next one's.

Asks nothing of vLLM but what its public interface offers; :func:`moa_drafter.vllm_environment.prepare` comes before
the import.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.platforms import current_platform

from moa_drafter.config import key_value_size
from moa_drafter.target import Target
from moa_drafter.training.generation import Sampled
from moa_drafter.training.settings import GenerateSettings
from moa_drafter.vllm_environment import VllmError, reason

_PLACES = 128  # texts that are written at once
#: Tokens of a cache block: small ones, for only whole ones are shared. On CPUs a multiple of 32.
_BLOCK = 32
_TEMPLATE = 256  # tokens that a chat template adds at most to what the settings bound
#: Of the GPU's memory, which the target as transformers has loaded it shares. The caches have their own size.
_GPU_SHARE = 0.5


class VllmDecoder:
    """Implements :class:`moa_drafter.training.generation.Decoder`.

    The caches hold half of what :data:`_PLACES` texts of the longest kind would take; where that is too little, texts
    wait. Nothing is found in them of an earlier batch, and no step is planned ahead of the one before it, so a batch is
    the same whatever came before. Inside a batch a text depends on those beside it, for products of other sizes are
    rounded in other ways.

    Args:
        settings: bound the length of texts.

    Raises:
        VllmError: vLLM computes on another device, or cannot run the target.
    """

    name = "vllm"

    def __init__(self, target: Target, settings: GenerateSettings) -> None:
        device, own = target.device.type, current_platform.device_type
        if device != own:
            raise VllmError(
                f"vLLM as it is installed here computes on {own}, not on {device}: choose --writer transformers, "
                "or install another build of vLLM"
            )
        self.target = target
        self._random = random.Random()
        longest = settings.longest_prompt + settings.prompt_tokens + settings.answer_tokens + _TEMPLATE
        self._length = min(longest, int(target.config.max_position_embeddings))
        blocks = -(-self._length // _BLOCK) * _PLACES // 2
        dtype = target.model.dtype
        block_bytes = _BLOCK * key_value_size(target.config) * target.config.num_hidden_layers * dtype.itemsize
        try:
            self._llm = LLM(
                str(target.folder),
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=str(dtype).removeprefix("torch."),
                seed=0,
                max_model_len=self._length,
                max_num_seqs=_PLACES,
                block_size=_BLOCK,
                kv_cache_memory_bytes=blocks * block_bytes,
                gpu_memory_utilization=_GPU_SHARE,
                enable_prefix_caching=True,
                async_scheduling=False,
                enforce_eager=own == "cpu",
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        except (ValueError, RuntimeError, TypeError, NotImplementedError, KeyError, ImportError) as error:
            raise VllmError(
                f"vLLM cannot run the target in {target.folder} here: {reason(error)}; --writer transformers may"
            ) from error

    def begin(self, seed: int) -> None:
        """See :meth:`moa_drafter.training.generation.Decoder.begin`."""
        self._llm.reset_prefix_cache()
        self._random.seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """See :meth:`~moa_drafter.training.generation.Decoder.write`. Each text has a seed of its own, so sampled texts
        do not depend on the order in which others end."""
        requests = {}
        for index, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
            params = {} if way is None else {**asdict(way), "seed": self._random.getrandbits(31)}
            room = self._length - len(prompt)
            if room > 0:
                requests[index] = self._params(min(new_tokens, room), **params)
        texts = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompts[index])) for index in requests],
            list(requests.values()),
            use_tqdm=False,
        )
        written = {index: list(text.outputs[0].token_ids) for index, text in zip(requests, texts, strict=True)}
        return [written.get(index, []) for index in range(len(prompts))]

    def close(self) -> None:
        """See :meth:`moa_drafter.training.generation.Decoder.close`."""
        del self._llm
        gc.collect()

    def _params(self, new_tokens: int, temperature: float = 0.0, **others: Any) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            max_tokens=new_tokens,
            stop_token_ids=list(self.target.stop_tokens),
            ignore_eos=True,  # it has no tokenizer to know it by
            detokenize=False,
            **others,
        )
