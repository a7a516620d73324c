"""Tiny random targets of many families, and how the engine computes each beside transformers.

``PYTHONPATH=tests python -m support.families`` prints the table of families in docs/models.md: each cell is run, those
for vLLM where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.errors import TargetError
from moa_decoder.weights import DecoderWeights
from moa_decoder.writer_graph import WriterGraph
from moa_drafter.architectures.registry import initialise, new_drafter
from moa_drafter.config import ConfigError, FitError, longest_context
from moa_drafter.target import Target, load_target
from moa_drafter.target_features import target_states
from moa_runtime.backends.base import StepInputs
from moa_runtime.backends.onnx_writer import OnnxWriter
from moa_runtime.drafters.moa import GrowingRows
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_server.engine.base import StepRequest, TargetEngine
from moa_server.engine.engine import LocalEngine
from moa_server.engine.load import prepare_vllm
from moa_server.engine.onnx_pass import OnnxPass
from moa_server.engine.target_pass import Piece, TargetPass
from moa_server.engine.torch_engine import torch_engine
from support.tiny import make_tiny_target

#: Tokens of a context, of an original context that was extended, of a window, and of a prompt.
CONTEXT, ORIGINAL, WINDOW, PROMPT = 40, 24, 30, 14
_BEST = 16
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **more}


_HEAD: dict[str, Any] = {"head_dim": 8}
_WINDOW: dict[str, Any] = {"sliding_window": WINDOW}
_MIXED: dict[str, Any] = {**_HEAD, **_WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
_MULTIPLIED = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_YARN = _rope("yarn", factor=4.0)
_FOUR = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: Pairs of a recurrent layer and one with attention.
_PAIRS = {
    kind: {"num_hidden_layers": 4, "layer_types": [kind, "attention" if kind == "mamba" else "full_attention"] * 2}
    for kind in ("conv", "linear_attention", "mamba")
}
_DELTA = {
    **_PAIRS["linear_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
_GEMMA_4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
_LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
_GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
#: The type of each model, and what its configuration has beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama (biases)": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 3 (llama3 positions)": (
        "llama",
        {"rope_parameters": _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "Llama (yarn)": ("llama", {"rope_parameters": _YARN}),
    "Llama (dynamic NTK)": ("llama", {"rope_parameters": _rope("dynamic", factor=4.0)}),
    "Qwen 2": ("qwen2", {}),
    "Qwen 3": ("qwen3", _HEAD),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral (window)": ("mistral", _WINDOW),
    "Ministral 3 (scaled queries)": ("ministral3", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}}),
    "Llama (query scaling ignored)": ("llama", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}}),
    "Phi 3": ("phi3", {}),
    "Phi 3 (partial rotation, window)": ("phi3", {**_WINDOW, "partial_rotary_factor": 0.5}),
    "Phi 3 (longrope)": (
        "phi3",
        {
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0, 4.0, 8.0, 16.0]),
        },
    ),
    "Gemma": ("gemma", _HEAD),
    "Gemma 2 (both soft caps)": (
        "gemma2",
        {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    ),
    "Gemma 3": ("gemma3_text", _MIXED),
    "Gemma 3n (soft cap)": (
        "gemma3n_text",
        {
            **_MIXED,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "final_logit_softcapping": 3.0,
        },
    ),
    "Granite (scaled logits, multipliers)": ("granite", {"logits_scaling": 8.0, **_MULTIPLIED}),
    "Granite (scaled logits alone)": ("granite", {"logits_scaling": 8.0, "attention_multiplier": 8**-0.5}),
    "Cohere (scaled logits)": ("cohere", {"logit_scale": 0.0625}),
    "Cohere 2 (scaled logits)": ("cohere2", {"logit_scale": 0.0625, **_WINDOW}),
    "OLMo 2": ("olmo2", {}),
    "SmolLM 3 (a layer without positions)": ("smollm3", {"no_rope_layers": [1, 0]}),
    "StableLM": ("stablelm", {}),
    "Starcoder 2": ("starcoder2", {}),
    "Llama 4 (chunks)": ("llama4_text", {**_HEAD, "attention_chunk_size": WINDOW}),
    "gpt-oss": (
        "gpt_oss",
        {**_MIXED, "layer_types": _MIXED["layer_types"][::-1], "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Qwen 2 MoE": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen 3 MoE": ("qwen3_moe", {**_EXPERTS, **_HEAD}),
    "Mixtral (window)": ("mixtral", {"num_local_experts": 4, **_WINDOW}),
    "Phi 3.5 MoE": ("phimoe", {"num_local_experts": 4, "sliding_window": None}),
    "OLMo": ("olmo", {}),
    "OLMo 3": ("olmo3", {**_WINDOW, **_FOUR}),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "EXAONE 4": ("exaone4", {**_HEAD, **_WINDOW, **_FOUR}),
    "GLM 4": ("glm4", _HEAD),
    "GLM 4 MoE": ("glm4_moe", {**_GLM_EXPERTS, **_HEAD, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "Granite MoE": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Apertus": ("apertus", {}),
    "Nemotron": ("nemotron", {}),
    "Phi 2": ("phi", {}),
    "Arcee": ("arcee", {}),
    "Helium": ("helium", _HEAD),
    "Seed-OSS": ("seed_oss", _HEAD),
    "Hunyuan": ("hunyuan_v1_dense", _HEAD),
    "ERNIE 4.5": ("ernie4_5", {}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "LFM 2": ("lfm2", {**_PAIRS["conv"], "block_ff_dim": 64}),
    "Qwen 3 Next": ("qwen3_next", {**_EXPERTS, **_HEAD, **_DELTA, "shared_expert_intermediate_size": 32}),
    "Qwen 3.5": ("qwen3_5_text", {**_HEAD, **_DELTA}),
    "Granite 4 (hybrid)": (
        "granitemoehybrid",
        {**_PAIRS["mamba"], **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
    "Gemma 4": (
        "gemma4_text",
        {**_HEAD, **_WINDOW, **_FOUR, "global_head_dim": 16, "num_kv_shared_layers": 2, **_GEMMA_4},
    ),
    "DeepSeek 3 (latent attention)": ("deepseek_v3", {**_GLM_EXPERTS, **_LATENT, "num_key_value_heads": 4}),
    "MiniCPM 3 (latent attention)": ("minicpm3", {"num_key_value_heads": 4}),
    "LFM 2 MoE": ("lfm2_moe", {**_EXPERTS, **_PAIRS["conv"]}),
    "Qwen 3.5 MoE": ("qwen3_5_moe_text", {**_EXPERTS, **_HEAD, **_DELTA, "shared_expert_intermediate_size": 32}),
    "MiniMax M2": ("minimax_m2", _EXPERTS),
    "VaultGemma": ("vaultgemma", {**_HEAD, **_WINDOW, **_FOUR}),
    "Falcon H1": ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16}),
    "Nemotron H": (
        "nemotron_h",
        {
            **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "moe"], **_HEAD},
            **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
            **{**_GLM_EXPERTS, "n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 32},
        },
    ),
    "OLMo Hybrid": ("olmo_hybrid", {**_DELTA, **_HEAD}),
    "OPT": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "GPT-2": ("gpt2", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "Falcon": ("falcon", {}),
}

#: Sizes for vLLM, whose kernels for processors take heads of 32 numbers and more; its contexts end in a third block.
_WIDE = {
    **{"hidden_size": 128, "initializer_range": 0.1, "max_position_embeddings": 4 * ORIGINAL},
    **{"head_dim": 32, "global_head_dim": 64, "mamba_head_dim": 32, "mamba_d_head": 64, "mamba_d_ssm": 256},
    "attention_chunk_size": 32,  # whole blocks
    **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "word_embed_proj_dim": 128},
}


@dataclass(frozen=True)
class Found:
    """How a target was computed."""

    runs: str  # the name of the pass
    trees: bool  # whether it takes trees
    context: int  # its longest one
    why: str  # no longer one is possible
    variation: float  # largest total variation of the distributions at temperature 1 from transformers'
    equal: bool  # whether greedy text up to the end of the context is transformers'


@dataclass(frozen=True)
class FoundByGraphs:
    """How a target was computed in onnxruntime, with float32 weights."""

    context: int
    deviation: float  # largest error of hidden states and logits, as a part of the largest number
    equal: bool  # whether greedy text up to the end of the context is transformers'
    rounded: float  # correlation of the logits in 4 bits with those
    writer: float  # largest error of the log-probabilities (nats) of an offline writer of float32 weights


def config_of(family: str, *, wide: bool = False) -> Any:
    """transformers' configuration; ``wide`` for vLLM."""
    from transformers import AutoConfig

    kind, own = FAMILIES[family]
    fields = {**SIZES, **own}
    if wide:
        fields = {name: _WIDE.get(name, value) for name, value in fields.items()}
        rope = fields.get("rope_parameters", {})
        factors = {name: value * 4 for name, value in rope.items() if isinstance(value, list)}
        fields |= {"rope_parameters": {**rope, **factors}} if factors else {}
    return AutoConfig.for_model(kind, **fields)


def make_target(family: str, tokenizer: Path, folder: Path, *, wide: bool = False) -> Path:
    """Write a random target of a family into ``folder``, with the files of the tokenizer of another target."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family, wide=wide))
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():  # norms and biases are ones and zeros at first
                parameter.data += torch.randn_like(parameter) / 4
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder)
    return folder


def computed(folder: Path) -> Found:
    """Run the target in ``folder``. Raises MoaError if it is refused."""
    target = load_target(str(folder))
    engine = torch_engine(target)
    context = engine.max_context
    text = _text_of(target, context)
    return Found(
        type(engine.target_pass).__name__,
        engine.capabilities.trees,
        context,
        _refusal(engine, context + 1),
        _variation(engine, text),
        _greedy(engine, text[:PROMPT], text) == text,
    )


@torch.no_grad()
def computed_by_graphs(folder: Path, weights: DecoderWeights | None = None) -> FoundByGraphs:
    """Run the target in ``folder`` in onnxruntime, with its weights or equal ones. Raises MoaError if it is refused."""
    weights = weights or CheckpointWeights(folder)
    run = OnnxPass(weights, threads=1)
    target = load_target(str(folder))
    text = _text_of(target, LocalEngine(target, run).max_context)
    hidden = _in_pieces(run, text)
    logits = np.stack(list(run.logits([hidden])))
    own = target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
    pairs = (hidden, own.hidden_states[-1][0].numpy()), (logits, own.logits[0].numpy())
    return FoundByGraphs(
        len(text),
        max(float(np.abs(given - wanted).max() / np.abs(wanted).max()) for given, wanted in pairs),
        logits[PROMPT - 1 : -1].argmax(-1).tolist() == text[PROMPT:],
        _correlation(folder, text, logits),
        float((_written(weights, text, folder) - own.logits[0].log_softmax(-1).topk(_BEST).values).abs().max()),
    )


def vllm_processes() -> ProcessPoolExecutor:
    """A new process for each call, because vLLM changes modules of transformers. Its environment must be prepared."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.families"])  # without vLLM: transformers' text comes first
    return ProcessPoolExecutor(1, context, max_tasks_per_child=1)


@torch.no_grad()
def refusal_of_vllm(folder: Path) -> str:
    """Run a wide target with vLLM, also after a part of its text was taken back; return why it is refused, or nothing.
    Raises AssertionError if the text, or its probability, is not transformers'."""
    from moa_server.engine.vllm.engine import VllmEngine

    try:
        target = load_target(str(folder))
        text = _text_of(target, longest_context(target.config, windows=True)[0])
        own = target.model(input_ids=torch.tensor([text])).logits[0].float().log_softmax(-1)
        engine = VllmEngine.load(str(folder), None)
    except MoaError as error:
        return str(error)
    text = text[: engine.max_context]
    for start in (PROMPT, len(text) - 4):
        assert _greedy(engine, text[:start], text) == text
    draft = StepRequest(1, text[:PROMPT], text[PROMPT:-1], sampling=Sampling(logprobs=1))
    found = [each.logprob for each in engine.step_now([draft])[0].logprobs]
    assert np.allclose(found, own[range(PROMPT - 1, len(text) - 1), text[PROMPT:]], atol=0.01)
    engine.close()
    return ""


def _correlation(folder: Path, text: list[int], logits: Any) -> float:
    rounded = OnnxPass(CheckpointWeights(folder, 4), threads=1)
    found = np.stack(list(rounded.logits([_in_pieces(rounded, text)])))
    return float(np.corrcoef(found.ravel(), logits.ravel())[0, 1])


def _written(weights: DecoderWeights, text: list[int], folder: Path) -> torch.Tensor:
    """The largest log-probabilities after each token, from an offline writer that is given the text in pieces."""
    onnx.save(WriterGraph(weights, top_k=_BEST, in_place=True).model, folder / "writer.onnx")
    writer = OnnxWriter(folder / "writer.onnx", threads=1)
    cache, found = GrowingRows(writer.kv_shape, heads_first=True), []
    for start, end in pairwise((0, 9, 10, len(text) - 5, len(text))):
        held = cache.first(start)
        result = writer.step(StepInputs.chain(text[start:end], held, held, asked=end - start))
        cache.write(start, result.keys, result.values)
        found.append(result.top_logprobs)
    return torch.from_numpy(np.concatenate(found))


def _text_of(target: Target, context: int) -> list[int]:
    """A prompt and transformers' greedy text after it, up to the end of the context."""
    prompt = torch.randint(3, 500, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    return target.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=context - PROMPT,
        do_sample=False,
        eos_token_id=[-1],
        pad_token_id=2,
    )[0].tolist()


def _in_pieces(run: TargetPass, text: list[int]) -> Any:
    """The hidden states of a text that is given in pieces."""
    cache, cuts = run.cache_shape.new_cache(len(text)), (0, 9, 10, len(text) - 5, len(text))
    parts = [run.forward([Piece(cache, start, text[start:end])])[0] for start, end in pairwise(cuts)]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def _refusal(engine: LocalEngine, context: int) -> str:
    try:
        torch_engine(engine.target, max_context=context)
    except MoaError as error:
        return str(error).rpartition(": ")[2]
    raise AssertionError("a context was taken that is longer than the longest one")


@torch.no_grad()
def _variation(engine: LocalEngine, text: list[int]) -> float:
    """After every token of a text that is given in pieces."""
    run = engine.target_pass
    own = engine.target.model(input_ids=torch.tensor([text])).logits[0].float().softmax(-1)
    given = torch.from_numpy(np.stack(list(run.logits([_in_pieces(run, text)]))))
    return float((given.softmax(-1) - own).abs().sum(-1).max() / 2)


def _greedy(engine: TargetEngine, prompt: list[int], text: list[int]) -> list[int]:
    """What the engine writes: token by token at first, then with ``text`` as a draft up to where it differs."""
    tokens, half = list(prompt), (len(prompt) + len(text)) // 2
    while len(tokens) < len(text):
        draft = text[len(tokens) : -1] if len(tokens) >= half and tokens == text[: len(tokens)] else []
        [outcome] = engine.step_now([StepRequest(1, tuple(tokens), draft, sampling=Sampling())])
        tokens += [*(draft[index] for index in outcome.path), outcome.token]
    return tokens


def cells(folder: Path) -> tuple[str, ...]:
    """Run the target in ``folder`` in all ways; return whether it and its writer run without torch, and in 4 bits, the
    pass with torch, drafts, and drafters."""
    try:
        found = computed(folder)
    except MoaError:
        return ("no",) * 5
    assert found.equal
    try:
        graphs = computed_by_graphs(folder)
        assert graphs.equal and graphs.writer < 1e-3 and graphs.rounded > 0.8
        own = "yes"
    except TargetError:
        own = "no"
    target = load_target(str(folder))
    trained = []
    for name, shown in (("moa", "MoA"), ("eagle3", "EAGLE-3"), ("independent", "independent")):
        with contextlib.suppress(ConfigError, FitError):
            trained += [shown] if _begins(name, target) else []
    fused = "fused" if found.runs == "FusedLlama" else "general"
    return own, own, fused, "trees" if found.trees else "chains", ", ".join(trained) or "copies"


def _begins(name: str, target: Target) -> bool:
    """Whether a drafter begins with finite weights, from a text."""
    drafter, text = new_drafter(name, target, draft_vocab_size=256), torch.arange(3, 3 + CONTEXT - 4)
    drafter.bind_target(target.embedding, target.head, target.layers, target.logits)
    initialise(drafter, target, [(text, target_states(target, text.tolist(), drafter.reads))])
    return all(bool(weight.isfinite().all()) for weight in drafter.parameters())


def table() -> list[str]:
    """The lines of the table: families with equal cells are in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch, vllm_processes() as processes:
        tokenizer = make_tiny_target(Path(scratch) / "tokenizer")
        served = {}
        for family in FAMILIES if importlib.util.find_spec("vllm") else ():  # while the other cells are run here
            wide = make_target(family, tokenizer, Path(scratch) / f"{len(served)} wide", wide=True)
            served[family] = processes.submit(refusal_of_vllm, wide)
        for number, family in enumerate(FAMILIES):
            found = cells(make_target(family, tokenizer, Path(scratch) / str(number)))
            last = "not run" if family not in served else "no" if served[family].result() else "yes"
            rows.setdefault((*found, last), []).append(family)
    titles = ["families", "without torch, writer", "4 bits", "pass in torch", "drafts", "drafters", "vLLM"]
    lines = [["; ".join(names), *found] for found, names in rows.items()]
    return ["| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *lines)]


def shown() -> dict[str, list[str]]:
    """The cells of each family in the table of docs/models.md."""
    lines = (Path(__file__).parents[2] / "docs" / "models.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {family: found for names, *found in rows for family in names.split("; ") if family in FAMILIES}


def main() -> None:
    if importlib.util.find_spec("vllm"):
        prepare_vllm(1)
    print(*table(), sep="\n")


if __name__ == "__main__":
    main()
