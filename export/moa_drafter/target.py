"""The target model: its identity, loading it, and its logits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from moa_decoder.checkpoint_weights import checkpoint_config, read_config, stored_tensors
from moa_decoder.errors import TargetError
from moa_decoder.text_part import PREFIXES, is_multimodal, text_name
from moa_decoder.weight_faults import WEIGHTS_DIFFER, WeightFaults
from moa_drafter.config import longest_context, original_contexts
from moa_drafter.target_facts import TargetFacts, facts_of, recommended_sampling, target_fingerprint
from moa_drafter.target_folder import write_tensors
from moa_drafter.target_source import DEFAULT_TARGET, resolve_target
from moa_drafter.transformers_config import (
    UNDESCRIBED,
    cannot_load,
    check_counts,
    check_room,
    quiet_transformers,
    supported_config,
    unsupported,
)
from moa_runtime.manifest import RecommendedSampling

#: Largest product of the head for measuring :attr:`TargetLogits.scale`, too small for a soft cap to matter.
_SMALL = 1e-2
#: Computes normed last hidden states ``[T, hidden]`` and logits ``[T, vocab_size]`` of ``T`` tokens from a position on.
Compute = Callable[[Sequence[int], int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Target:
    """A loaded target: transformers' model and tokenizer, and its identity."""

    folder: Path
    model: Any
    tokenizer: Any
    fingerprint: str

    @property
    def config(self) -> Any:
        """transformers' configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def head(self) -> torch.Tensor:
        """Output matrix ``[vocab_size, hidden]``, multiplied by its family's scale of logits (a copy then)."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight if self.logits.scale == 1 else weight * self.logits.scale

    @cached_property
    def logits(self) -> TargetLogits:
        """The computation of logits from the last hidden states."""
        return TargetLogits(self.model)

    @property
    def embedding(self) -> torch.Tensor:
        """Token embedding ``[vocab_size, hidden]``."""
        return self.model.get_input_embeddings().weight

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """Decoder layers, the first one first."""
        return self.model.model.layers

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn, ascending, of tokenizer and generation configuration. Raises TargetError
        if there are none."""
        return _stop_tokens(self.folder, self.model.generation_config, self.tokenizer)

    @property
    def recommended_sampling(self) -> RecommendedSampling | None:
        """The authors' sampling for chats, from the generation configuration or a built-in target's model card."""
        return recommended_sampling(self.folder, self.model.generation_config.to_diff_dict())

    @property
    def chat_template(self) -> str:
        """The source of the default chat template, Jinja. Raises TargetError if there is none."""
        try:
            template: str = self.tokenizer.get_chat_template()
        except ValueError:
            template = ""
        if not template:
            raise TargetError(f"the target in {self.folder} has no chat template", code="no_chat_template")
        return template

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by name, such as ``bos_token``, for the chat template."""
        named: dict[str, Any] = self.tokenizer.special_tokens_map
        return {name: str(text) for name, text in named.items() if isinstance(text, str)}


class TargetLogits:
    """A causal language model of transformers without its ``model``, the layers and final norm: its head, then its
    family's scaling (Granite, Cohere) or soft cap (Gemma)."""

    def __init__(self, model: Any) -> None:
        self._model = _shallow_copy(model)
        self._model.model = _Given(model.model)
        self._head: nn.Linear = model.get_output_embeddings()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits ``[n, vocab_size]`` of normed states ``[n, hidden]``."""
        return _forward(self._model, hidden)

    def of_tokens(self, hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        """Compute the logits ``[n, len(tokens)]`` of some tokens.

        Args:
            hidden: normed, ``[n, hidden]``.
            head: the tokens' rows of :attr:`Target.head`, in any type and on any device.
            tokens: ids.
        """
        rows = nn.Linear(head.shape[1], len(head), bias=self._head.bias is not None, device="meta")
        rows.weight = nn.Parameter(head, requires_grad=False)
        if self._head.bias is not None:
            rows.bias = nn.Parameter(self._head.bias.detach()[tokens.to(self._head.bias.device)].to(head), False)
        model = _shallow_copy(self._model)
        model.set_output_embeddings(rows)
        return _forward(model, hidden / self.scale)  # these rows are multiplied already

    @cached_property
    @torch.no_grad()
    def scale(self) -> float:
        """Factor from the products of the head to the logits, measured below any soft cap."""
        weight = self._head.weight
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, weight.shape[1], generator=generator).to(weight)
        hidden *= _SMALL / (hidden @ weight.T).abs().max()
        products = (hidden @ weight.T).float()
        logits = (self(hidden) - self(-hidden)).float() / 2  # without a bias
        scale = float((logits * products).sum() / products.square().sum())
        return 1.0 if abs(scale - 1) < 1e-3 else float(f"{scale:.4g}")


def target_facts(name: str = DEFAULT_TARGET) -> TargetFacts:
    """Find a target, and check names and shapes of its weights without loading them; those of quantised checkpoints
    are not checked, because an engine may read formats that transformers cannot.

    Raises:
        TargetError: see :func:`moa_drafter.target_source.resolve_target`, :func:`moa_drafter.target_facts.facts_of` and
            :func:`load_target`.
    """
    folder = resolve_target(name)
    try:
        return facts_of(folder)
    except TargetError as error:
        if error.code not in UNDESCRIBED:
            raise
    return _facts_of_transformers(folder)


def _facts_of_transformers(folder: Path) -> TargetFacts:
    quiet_transformers()
    from transformers import AutoTokenizer, GenerationConfig

    config = _checked_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        own = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if own else GenerationConfig.from_model_config(config)
    except Exception as error:  # tokenizers raises it for what it cannot read
        raise cannot_load(folder, error) from error
    return TargetFacts(folder, config, target_fingerprint(folder), _stop_tokens(folder, generation, tokenizer))


def load_target(name: str = DEFAULT_TARGET, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """Load a target for inference, by default in float32 on the CPU and bfloat16 elsewhere.

    Raises:
        TargetError: see :func:`resolve_target`; also a model that is no Llama-like causal model, damaged weights
            (code ``damaged``), tensors that are missing, superfluous or of another shape (``weights_differ``), and
            quantised weights for which packages are missing (``quantised``).
    """
    folder = resolve_target(name)
    write_tensors(folder)
    method = read_config(folder).get("quantization_config")
    try:
        return _load(folder, device, dtype)
    except (TargetError, RuntimeError, ValueError) as error:  # the latter two if it cannot be moved to the device
        if method is None:
            raise
        named = method.get("quant_method") if isinstance(method, dict) else None
        raise TargetError(
            f"the weights in {folder} are quantised ({named or 'in an unknown way'}) and cannot be loaded here "
            f"({error}): take the model's original weights, or a GGUF file of it",
            code="quantised",
        ) from error


def _load(folder: Path, device: str, dtype: torch.dtype | None) -> Target:
    quiet_transformers()
    from transformers import AutoTokenizer

    config = _checked_config(folder)
    if hasattr(config, "quantization_config"):
        held = sum(tensor.stop - tensor.start for tensor in stored_tensors(folder).values())
        check_room(str(folder), config, 8 * held)  # each bit may be one
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    # Older releases of transformers choose an attention that has no soft caps.
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = _whole_model(folder, dtype=dtype, **capped)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises it for what it cannot read
        raise cannot_load(folder, error) from error
    return Target(folder, model.eval().to(device), tokenizer, target_fingerprint(folder))


def _checked_config(folder: Path) -> Any:
    """Return :func:`supported_config` after a comparison with names and shapes of the weights, none of which is loaded
    or made; of quantised ones with their number."""
    config = supported_config(folder)
    check_counts(str(folder), config, [tensor.shape for tensor in stored_tensors(folder).values()])
    if not hasattr(config, "quantization_config"):
        _whole_model(folder, device_map="meta")
    return config


def _whole_model(folder: Path, **settings: Any) -> Any:
    """Load a model, or the text part of one, and refuse missing tensors, for which transformers would make up random
    numbers."""
    from transformers import AutoModelForCausalLM

    settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if multimodal := is_multimodal(checkpoint_config(folder)):
        names = {f"^{re.escape(prefix)}": own for prefix, own in PREFIXES.items()}
        settings |= {"config": supported_config(folder), "key_mapping": names}
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(folder, **settings)
    except (RuntimeError, SafetensorError) as error:
        raise TargetError(f"the weights in {folder} are damaged: fetch them again", code="damaged") from error
    except Exception as error:  # transformers has many errors for impossible sizes
        raise cannot_load(folder, error) from error
    if multimodal:
        loading_info["unexpected_keys"] = {name for name in loading_info["unexpected_keys"] if text_name(name)}
    if faults := WeightFaults.reported(loading_info):
        raise TargetError(
            f"the weights in {folder} are not those of its config.json: {faults}; fetch the target again",
            code=WEIGHTS_DIFFER,
        )
    if not hasattr(getattr(model, "model", None), "layers"):
        raise unsupported(folder, model.config.model_type)
    return model


def _stop_tokens(folder: Path, generation: Any, tokenizer: Any) -> tuple[int, ...]:
    listed = generation.eos_token_id
    named = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    ids = {number for number in named if number is not None and number >= 0}
    if not ids:
        raise TargetError(f"the target in {folder} names no end-of-turn token (eos_token_id)", code="no_stop_token")
    return tuple(sorted(ids))


class _Given(nn.Module):
    """Stand-in for the layers, with their numbers (one multiplies Falcon H1's head): return the given embeddings as
    their output."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layers).items() if isinstance(value, float)})

    def forward(self, *, inputs_embeds: Tensor, **others: object) -> MoeModelOutputWithPast:
        out = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
        out.shared_kv_states = None  # Gemma 4 passes them on
        return out


def _shallow_copy(model: Any) -> Any:
    """Return another module with the same parts, to replace some of them."""
    own = copy.copy(model)
    own._modules = dict(model._modules)
    return own


def _forward(model: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=hidden[None]).logits[0]
    return logits


@torch.no_grad()
def deviation_from_transformers(target: Target, count: int, compute: Compute) -> float:
    """Return the largest root mean square error of hidden states and logits, relative to transformers' own, over texts
    of ``count`` tokens at the beginning and the end of the context, and across the end of an extended original one."""
    longest, _ = longest_context(target.config)
    ends = {end + count // 2 for end in original_contexts(target.config)} | {longest}
    starts = [0, *sorted(end - count for end in ends if count < end <= longest)]
    text = [(7919 * index + 13) % target.config.vocab_size for index in range(count)]
    pairs = [zip(compute(text, start), _own(target, text, start), strict=True) for start in starts]
    return max(_error(*pair) for start in pairs for pair in start)


def _own(target: Target, text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    states: list[Tensor] = []
    hook = target.model.model.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state[0]))
    try:
        ids = torch.tensor([text], device=target.device)
        positions = torch.arange(start, start + len(text), device=target.device)[None]
        logits: Tensor = target.model(input_ids=ids, position_ids=positions).logits[0]
    finally:
        hook.remove()
    return states[0], logits


def _error(found: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    error = (found.float() - expected).square().mean() / expected.square().mean()
    return float(error.sqrt().nan_to_num(torch.inf))  # comparisons with NaN are always false
