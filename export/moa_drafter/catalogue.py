"""Models that people have: targets with the drafters and writers that are published for them, under short names.

Identifiers, licences and shapes are those of the public model cards and configurations. Needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: Bytes of a weight by type, scales included.
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.13, "int4": 0.66}
#: Bytes of a number in the caches.
_CACHE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "int4": 2}


@dataclass(frozen=True)
class ModelSize:
    """Sizes that decide the memory of a target.

    Attributes:
        parameters: of the whole model.
        kv_numbers: keys and values of one token, in all layers.
        rounds: whether it can be computed in 8 and 4 bits.
    """

    parameters: float
    kv_numbers: int
    rounds: bool = True

    def bytes_needed(self, dtype: str, cache_tokens: int) -> float:
        """Return the bytes of weights and full caches. ``dtype``: ``float32``, ``bfloat16``, ``int8`` or ``int4``."""
        return self.parameters * _WEIGHT_BYTES[dtype] + cache_tokens * self.kv_numbers * _CACHE_BYTES[dtype]

    def cache_tokens_within(self, dtype: str, most: float) -> int:
        """Return how many tokens of caches ``most`` bytes leave room for; below 0 if the weights take more."""
        return int((most - self.bytes_needed(dtype, 0)) // max(1, self.kv_numbers * _CACHE_BYTES[dtype]))


@dataclass(frozen=True)
class CataloguedModel:
    """A target and what goes with it.

    Attributes:
        target: the built-in target's name, or a Hub id.
        drafters: names of shipped drafters or Hub ids, the default first; none: ``sssd``, which copies.
        writer: what writes offline: ``target``, a Hub id with the same tokenizer, or empty for none.
        licence: of the target; "gated": it has to be accepted on the Hub, whose token is in HF_TOKEN.
        use: what it is good for.
        run: whether this project has run it; others were not fetched here.
    """

    target: str
    size: ModelSize
    drafters: tuple[str, ...]
    writer: str
    licence: str
    use: str
    run: bool = False


_QWEN_WRITER = "Qwen/Qwen3-0.6B"
#: By name.
CATALOGUE: Mapping[str, CataloguedModel] = {
    "smollm2-135m-instruct": CataloguedModel(
        "smollm2-135m-instruct",
        ModelSize(0.135e9, 30 * 2 * 3 * 64),
        ("moa", "early-exit", "independent"),
        "target",
        "Apache 2.0",
        "first steps, tests",
        run=True,
    ),
    "smollm2-360m-instruct": CataloguedModel(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        ModelSize(0.362e9, 32 * 2 * 5 * 64),
        (),
        "target",
        "Apache 2.0",
        "short answers on small processors",
    ),
    "smollm2-1.7b-instruct": CataloguedModel(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        ModelSize(1.71e9, 24 * 2 * 32 * 64),
        (),
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "Apache 2.0",
        "English chats on a processor",
    ),
    "gemma-3-1b-it": CataloguedModel(
        "google/gemma-3-1b-it",
        ModelSize(1.0e9, 26 * 2 * 256),
        (),
        "",
        "Gemma, gated",
        "many languages, small caches",
    ),
    "qwen3-0.6b": CataloguedModel(
        "Qwen/Qwen3-0.6B",
        ModelSize(0.6e9, 28 * 2 * 8 * 128),
        (),
        "target",
        "Apache 2.0",
        "the smallest that reasons",
    ),
    "qwen3-1.7b": CataloguedModel(
        "Qwen/Qwen3-1.7B",
        ModelSize(1.72e9, 28 * 2 * 8 * 128),
        ("AngelSlim/Qwen3-1.7B_eagle3",),
        _QWEN_WRITER,
        "Apache 2.0",
        "reasoning on a processor",
    ),
    "qwen3-4b": CataloguedModel(
        "Qwen/Qwen3-4B",
        ModelSize(4.02e9, 36 * 2 * 8 * 128),
        ("AngelSlim/Qwen3-4B_eagle3",),
        _QWEN_WRITER,
        "Apache 2.0",
        "reasoning, tools",
    ),
    "qwen3-8b": CataloguedModel(
        "Qwen/Qwen3-8B",
        ModelSize(8.19e9, 36 * 2 * 8 * 128),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "AngelSlim/Qwen3-8B_eagle3"),
        _QWEN_WRITER,
        "Apache 2.0",
        "reasoning, tools, on a GPU",
    ),
    "llama-3-8b-instruct": CataloguedModel(
        "meta-llama/Meta-Llama-3-8B-Instruct",
        ModelSize(8.03e9, 32 * 2 * 8 * 128),
        ("huawei-noah/MOASpec-Llama-3-8B-Instruct",),
        "",
        "Llama 3, gated",
        "the paper's own MoA drafter",
    ),
    "llama-3.1-8b-instruct": CataloguedModel(
        "meta-llama/Llama-3.1-8B-Instruct",
        ModelSize(8.03e9, 32 * 2 * 8 * 128),
        ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.1, gated",
        "chats on a GPU",
    ),
    "gpt-oss-20b": CataloguedModel(
        "openai/gpt-oss-20b",
        ModelSize(20.9e9, 24 * 2 * 8 * 64, rounds=False),
        ("RedHatAI/gpt-oss-20b-speculator.eagle3",),
        "",
        "Apache 2.0",
        "reasoning on a large GPU",
    ),
}
COLUMNS = ("name", "target", "drafters", "writer", "licence", "GB", "good for", "run")
#: Tokens of caches in the column of memory.
_SHOWN_CACHE = 4096


def catalogue_rows() -> Iterator[tuple[str, ...]]:
    """Yield the catalogue's cells by :data:`COLUMNS`; GB are those in 4 bits, if it rounds, and 16 bits."""
    for name, model in CATALOGUE.items():
        dtypes = ("int4", "bfloat16") if model.size.rounds else ("bfloat16",)
        sizes = (model.size.bytes_needed(dtype, _SHOWN_CACHE) / 1e9 for dtype in dtypes)
        yield (
            name,
            model.target,
            ", ".join(model.drafters) or "sssd",
            model.writer or "none",
            model.licence,
            " / ".join(f"{size:.1f}" for size in sizes),
            model.use,
            "yes" if model.run else "not run",
        )


def default_drafter(model: str) -> str | None:
    """Return the drafter for a name of the catalogue if a user names none: its first, or ``sssd``. None for others."""
    return (*CATALOGUE[model].drafters, "sssd")[0] if model in CATALOGUE else None


def drafter_advice(model: str) -> str:
    """Return what a drafter would bring to a target without one, and how to get one."""
    published = next((each.drafters for name, each in CATALOGUE.items() if model in (name, each.target)), ())
    own = "--drafter takes a published EAGLE-3 head of this target, or what moa-train makes"
    found = f"--drafter {published[0]} is published for this target" if published else own
    return f"a drafter makes answers quicker: {found} (docs/models.md)"
