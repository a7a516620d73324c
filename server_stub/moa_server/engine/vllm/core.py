"""vLLM's engine core in this process: its configuration, its steps, its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from moa_drafter.config import head_size, key_value_size
from moa_drafter.target_facts import TargetFacts
from moa_drafter.vllm_environment import reason
from moa_server.engine.base import EngineError
from moa_server.engine.sampling import Chooser
from moa_server.engine.target_pass import Fusion
from moa_server.engine.vllm.paged_cache import BLOCK, MOST_DRAFTED, SPARE, PagedLayer, block_bytes
from moa_server.engine.vllm.sampler import TargetSampler
from moa_server.engine.vllm.scheduler import ParkingScheduler

#: Tokens of one step of vLLM's at most; bounds the memory that it takes.
_STEP_TOKENS = 2048
#: Exceptions of vLLM if it does not support a target.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)


@dataclass(frozen=True)
class SharedTargetWeights:
    """See :class:`moa_server.drafting.batched_model.SharedTargetWeights`."""

    device: torch.device
    embedding: Tensor
    head: Tensor


class VllmCore:
    """A target that vLLM has loaded. One call at a time; steps belong to the thread that loaded it.

    Args:
        max_context: tokens of a conversation.
        blocks: of the caches.
        sequences: most of them in one step.
        fusion: makes features of states between layers; None if none are kept.

    Attributes:
        features: of all slots of the caches, ``[slots, size]``; None without a fusion.

    Raises:
        EngineError: vLLM cannot run the target here, or gives no states between its layers.
    """

    def __init__(
        self,
        target: TargetFacts,
        dtype: torch.dtype,
        max_context: int,
        blocks: int,
        sequences: int,
        fusion: Fusion | None = None,
    ) -> None:
        self.blocks, self.features = blocks, None
        if target.config.model_type == "gemma3n_text":  # vLLM has them for prompts with pictures alone
            text = f"vLLM leaves out the per-layer embeddings of the target in {target.folder}"
            raise EngineError(f"{text}: choose --engine transformers", code="unsupported_target")
        with _refusing(target):
            config = _config(target, dtype, max_context, blocks, sequences)
            with _inner_states(fusion):
                self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler: ParkingScheduler = self._core.scheduler
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or groups[0].kv_cache_spec.block_size != BLOCK:
            text = f"the target in {target.folder} has several kinds of caches: choose --engine transformers"
            raise EngineError(text, code="unsupported_target")
        self._runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        self._check_positions(target, max_context)
        self._add_biases_of_experts()
        self._layers: dict[str, Any] = {
            name: config.compilation_config.static_forward_context[name] for name in groups[0].layer_names
        }
        self._check_windows(target)
        self._sampler = TargetSampler(self._runner)
        if fusion is not None:
            if not self._runner.use_aux_hidden_state_outputs:
                text = f"vLLM gives no states between the layers of the target in {target.folder}, which this drafter"
                raise EngineError(f"{text} reads: choose --engine transformers", code="unsupported_drafter")
            device = self._runner.device
            self.features = torch.zeros((blocks + 1) * BLOCK, fusion.size, dtype=dtype, device=device)
            self._keep_features(fusion, self.features)
        most = max_context + SPARE
        self._params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        self._target = target
        trial = "trial"
        with _refusing(target):  # what some attention backends refuse only in a step
            self.begin(trial, [0], trial)
            self.step({trial: ()}, {trial: None})
            self.drop([trial])

    def _check_positions(self, target: TargetFacts, max_context: int) -> None:
        """Raise an EngineError if a table of rotary positions is too short: vLLM would read what lies after it."""
        for module in self._runner.get_model().modules():
            table = getattr(module, "cos_sin_cache", None)
            if table is not None and len(table) < max_context:
                text = f"vLLM has rotary positions for {len(table)} tokens of the target in {target.folder}"
                raise EngineError(f"{text}: lower --max-context to that", code="out_of_range")

    def _add_biases_of_experts(self) -> None:
        """Count the experts as one group, because vLLM's router for processors omits biases without groups (ERNIE
        4.5)."""
        for module in self._runner.get_model().modules():
            router: Any = getattr(module, "router", None)
            biased = isinstance(router, CPURouter) and router.e_score_correction_bias is not None
            if biased and router.scoring_func == "softmax":
                router.use_grouped_topk = True
                router.num_expert_group = router.num_expert_group or 1
                router.topk_group = router.topk_group or 1

    def _check_windows(self, target: TargetFacts) -> None:
        """Raise an EngineError if vLLM gives windows to other layers than transformers."""
        config = target.config
        if not (kinds := getattr(config, "layer_types", None)):
            return
        for name, layer in self._layers.items():
            window = config.sliding_window if kinds[extract_layer_index(name)] == "sliding_attention" else None
            if getattr(layer, "sliding_window", None) != window:
                text = f"vLLM gives layers of the target in {target.folder} other windows than transformers"
                raise EngineError(f"{text}: choose --engine transformers", code="unsupported_target")

    def _keep_features(self, fusion: Fusion, features: Tensor) -> None:
        """Let each forward store the features of its tokens, in the slots of their keys and values."""
        forward, layers = self._runner._model_forward, sorted({layer + 1 for layer in fusion.inner_layers})

        def storing(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            inner = dict(zip(layers, output[1], strict=True))
            slots = next(iter(get_forward_context().slot_mapping.values()))
            used = slots[slots >= 0]  # the others pad the step, after its tokens
            states = [inner[layer + 1][: len(used)] for layer in fusion.inner_layers]
            features[used] = fusion(states).to(features.dtype)
            return output

        self._runner._model_forward = storing

    @property
    def batch_invariant(self) -> bool:
        """Whether vLLM's kernels give a token the same bits in any batch, as VLLM_BATCH_INVARIANT asks."""
        return bool(envs.VLLM_BATCH_INVARIANT) and current_platform.is_cuda_alike()

    @property
    def shared_weights(self) -> SharedTargetWeights:
        """The target's embedding and head: vLLM's own memory, but for a head whose products its family scales."""
        model, vocabulary = self._runner.get_model(), self._target.config.vocab_size
        # The first table; others are of layers (Gemma 3n), or the head. Some families have no head of their own.
        table = next(module for module in model.modules() if isinstance(module, VocabParallelEmbedding))
        embedding, head = (each.weight[:vocabulary] for each in (table, getattr(model, "lm_head", table)))  # padded
        scale = model.logits_processor.scale
        return SharedTargetWeights(embedding.device, embedding, head if scale == 1 else head * scale)

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds; what lies in them may still be found."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def table(self, name: str) -> list[int]:
        """Return the blocks of a request, in the order of its tokens; none before it begins."""
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(name)
        return list(blocks)

    def lost(self, name: str) -> bool:
        """Whether vLLM has preempted a request, or ended it."""
        request = self._scheduler.requests.get(name)
        return request is None or request.status == RequestStatus.PREEMPTED

    def begin(self, name: str, tokens: Sequence[int], salt: str) -> None:
        """Add a request for the next step. Requests of the same salt share the blocks that they begin with."""
        hasher = self._core.request_block_hasher
        own = Request(name, list(tokens), self._params, None, block_hasher=hasher, cache_salt=salt)
        self._core.add_request(own)

    def rewrite(self, name: str, keep: int, tokens: Sequence[int]) -> None:
        """See :meth:`ParkingScheduler.rewrite`."""
        self._scheduler.rewrite(name, keep, tokens)

    def drop(self, names: Iterable[str]) -> None:
        """Forget requests, and free their blocks."""
        self._core.abort_requests(list(names))

    def step(
        self, drafts: Mapping[str, Sequence[int]], choosers: Mapping[str, Chooser | None]
    ) -> dict[str, list[int]] | None:
        """Run one forward for these requests, by name: each has a draft, perhaps an empty one, and a way to choose.

        Returns:
            for each finished request, the accepted tokens of its draft and the choice after them; None if there was no
            space for any request.
        """
        self._scheduler.wake(drafts)
        self._sampler.choosers = choosers
        outputs, ran = self._core.step()
        if not ran:
            return None
        return {each.request_id: each.new_token_ids for group in outputs.values() for each in group.outputs}

    def paged_layers(self) -> dict[int, PagedLayer]:
        """Return the caches of the layers, by number.

        Raises:
            EngineError: see :meth:`PagedLayer.learnt`.
        """
        config, learnt = self._target.config, {}
        size = head_size(config)
        heads = key_value_size(config) // (2 * size)
        for name, layer in self._layers.items():
            if len(layer.kv_cache) != self.blocks + 1:
                text = "this attention backend of vLLM has blocks of another size than its scheduler"
                raise EngineError(text, code="unsupported_cache")

            def store(keys: Tensor, values: Tensor, slots: Tensor, layer: Any = layer) -> None:
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

            learnt[extract_layer_index(name)] = PagedLayer.learnt(layer.kv_cache, store, heads, size)
        return learnt

    def close(self) -> None:
        """Free what vLLM holds."""
        self._core.shutdown()


@contextmanager
def _refusing(target: TargetFacts) -> Iterator[None]:
    """Raise an EngineError for what vLLM raises if it does not support a target."""
    try:
        yield
    except _FAILURES as error:
        text = f"vLLM cannot run the target in {target.folder} here: {reason(error)}; --engine transformers may"
        raise EngineError(text, code="unsupported_target") from error


@contextmanager
def _inner_states(fusion: Fusion | None) -> Iterator[None]:
    """Let the targets that vLLM loads meanwhile also return what enters the layers that a fusion reads.

    vLLM itself asks for them after it has loaded a target, for its own EAGLE-3, and before it compiles it.
    """
    if fusion is None:
        yield
        return
    original = GPUModelRunner._setup_eagle3_aux_hidden_state_outputs

    def set_up(runner: Any) -> None:
        model = runner.get_model()
        if supports_eagle3(model):
            runner.use_aux_hidden_state_outputs = True
            model.set_aux_hidden_state_layers(tuple(sorted({layer + 1 for layer in fusion.inner_layers})))

    GPUModelRunner._setup_eagle3_aux_hidden_state_outputs = set_up
    try:
        yield
    finally:
        GPUModelRunner._setup_eagle3_aux_hidden_state_outputs = original


def _config(target: TargetFacts, dtype: torch.dtype, max_context: int, blocks: int, sequences: int) -> VllmConfig:
    pool = blocks + 1  # vLLM keeps one for nothing
    return EngineArgs(
        model=str(target.folder),
        hf_overrides=_overrides(target.config),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=str(dtype).removeprefix("torch."),
        seed=0,
        max_model_len=max_context + SPARE,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(_STEP_TOKENS, sequences),
        block_size=BLOCK,
        num_gpu_blocks_override=pool,
        kv_cache_memory_bytes=pool * block_bytes(target, dtype),
        enable_prefix_caching=True,
        enforce_eager=current_platform.is_cpu(),
        async_scheduling=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        scheduler_cls=ParkingScheduler,
        distributed_executor_backend=WholeCaches,
        speculative_config={
            "method": "custom_class",
            "model": f"{NoProposals.__module__}.{NoProposals.__qualname__}",
            "num_speculative_tokens": MOST_DRAFTED,
        },
    ).create_engine_config()


def _overrides(config: Any) -> dict[str, Any]:
    """Return the fields that vLLM reads otherwise than transformers."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "ministral3" and (beta := rope.get("llama_4_scaling_beta")):
        original = "original_max_position_embeddings"
        return {"llama_4_scaling": {original: rope[original], "beta": beta}}
    if config.model_type == "cohere2":  # vLLM adds one
        return {"sliding_window": config.sliding_window - 1}
    return {}


class WholeCaches(UniProcExecutor):  # type: ignore[misc]
    """Keeps every token in the caches of layers with a window, too: conversations are rewound, and drafters read all
    rows. The layers see no more of them than before."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return vLLM's description of each layer's cache, without windows and chunks."""
        windows = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
        return [
            {
                name: replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens",))
                if type(spec) in windows
                else spec
                for name, spec in layers.items()
            }
            for layers in super().get_kv_cache_specs()
        ]


class NoProposals:
    """Proposes nothing, so vLLM verifies only drafts that the verifier was given. vLLM makes one by the name in
    ``speculative_config``."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return an empty draft for each request of the step."""
        return [[] for _ in sampled_token_ids]
