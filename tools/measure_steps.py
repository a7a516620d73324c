"""Measure how long steps of a target, and of a drafter beside it, take; weights are random, in a published shape.

    python tools/measure_steps.py --shape llama-3-8b --device cuda --dtype bfloat16 --json steps.jsonl
    python tools/measure_steps.py --sessions 1,2 --rows 1,3 --context 70       # a tiny target on this CPU

Parts (``--parts``):

bare      transformers' forward, head and choice over all sessions at once: static shapes, a CUDA graph on a GPU, no
          attention mask. An engine without overhead would take about this long.
products  the products of all layers and the head alone, by the rows of all sessions together
fused     whole steps of the verifier's engine with its fused pass, the default for Llama-like targets
general   whole steps of the verifier's engine with its general pass, which runs sequence by sequence
prefill   a prompt through the fused pass
drafter   a drafting level beside the target for several sessions, and the memory rows of new tokens

Each figure is of ``--repeats`` runs after three warm-up runs: wall time in milliseconds, the device synchronised.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moa_drafter.config import head_size
from moa_drafter.target import Target
from moa_runtime.backends.base import StepInputs
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.drafting.batched_model import TOP_K, Batch, PackedDeviceModule
from moa_server.engine.base import StepRequest, new_sequence
from moa_server.engine.engine import LocalEngine
from moa_server.engine.memory_rows import MemoryRows, Span
from moa_server.engine.torch_engine import torch_engine
from random_target import SHAPES, random_drafter, random_target

PARTS = ("bare", "products", "fused", "general", "prefill", "drafter")
_WARM_UP = 3


class Record:
    """Print rows of figures as they come, and append them to a file.

    Args:
        common: fields of every row.
        file: gets a JSON object a line; None for none.
    """

    def __init__(self, device: torch.device, repeats: int, common: dict[str, Any], file: Path | None) -> None:
        self._device, self._repeats, self._common, self._file = device, repeats, common, file

    def least_ms(self, run: Callable[[], object]) -> float:
        """Return the milliseconds of the fastest run."""
        return min(self._times(run))

    def timed(self, run: Callable[[], object], **sizes: Any) -> None:
        """Time ``run`` and add a row with its ``sizes``."""
        times = self._times(run)
        self.add(**sizes, min_ms=round(min(times), 4), median_ms=round(statistics.median(times), 4))

    def _times(self, run: Callable[[], object]) -> list[float]:
        times = []
        for _ in range(_WARM_UP + self._repeats):
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            times.append(1000 * (time.perf_counter() - began))
        return times[_WARM_UP:]

    def add(self, **row: Any) -> None:
        """Add a row as it is."""
        line = json.dumps({**self._common, **row})
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(line + "\n")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


# -- the target alone --------------------------------------------------------------------------


class _FilledLayer(DynamicLayer):
    """Keys and values of a context that is held already; each forward overwrites the new tokens' part."""

    def __init__(self, keys: Tensor, values: Tensor, context: int, rows: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._new = slice(context, context + rows)
        self.keys, self.values = keys[:, :, : context + rows], values[:, :, : context + rows]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kw: object) -> tuple[Tensor, Tensor]:
        """Write ``[sessions, kv_heads, rows, head_dim]`` after the context; the length stays."""
        self.keys[:, :, self._new], self.values[:, :, self._new] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._new.start


def _unmasked(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, **kw: Any) -> tuple[Tensor, None]:
    """Attend to all keys, each read once for all heads of its group; a causal mask would cost time here."""
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    mixed = functional.scaled_dot_product_attention(grouped, k, v, scale=kw["scaling"])
    return mixed.unflatten(2, (-1, q.shape[2])).flatten(1, 2).transpose(1, 2), None


@torch.inference_mode()
def measure_bare(target: Target, record: Record, context: int, sessions: Sequence[int], rows: Sequence[int]) -> None:
    """Time the target's own forward, the head, and the most likely token of every row."""
    model, config, device = target.model, target.config, target.device
    ALL_ATTENTION_FUNCTIONS.register("unmasked", _unmasked)
    size = head_size(config)
    shape = (max(sessions), config.num_key_value_heads, context + max(rows), size)
    held = [
        [torch.randn(shape, device=device, dtype=model.dtype) for _ in range(2)]
        for _ in range(config.num_hidden_layers)
    ]
    with patch.object(config, "_attn_implementation_internal", "unmasked"):
        for count in sessions:
            for new in rows:
                ids = torch.randint(config.vocab_size, (count, new), device=device)
                positions = torch.arange(context, context + new, device=device).expand(count, new)
                cache = Cache(layers=[_FilledLayer(*(half[:count] for half in layer), context, new) for layer in held])

                def forward(ids: Tensor = ids, positions: Tensor = positions, cache: Cache = cache) -> Tensor:
                    out = model.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
                    return model.get_output_embeddings()(out.last_hidden_state).argmax(-1)

                sizes = {"context": context, "sessions": count, "rows": new}
                if device.type == "cuda":
                    record.timed(_graph(forward).replay, part="bare", **sizes)
                if device.type != "cuda" or new == 1:
                    record.timed(forward, part="bare without a graph", **sizes)


@torch.inference_mode()
def measure_products(target: Target, record: Record, rows: Sequence[int]) -> None:
    """Time the products with all the target's matrices, for ``rows`` rows each."""
    matrices = [each for each in target.model.modules() if isinstance(each, torch.nn.Linear)]
    for count in rows:
        inputs = {
            size: torch.randn(count, size, device=target.device, dtype=target.model.dtype)
            for size in {each.in_features for each in matrices}
        }

        def multiply(inputs: dict[int, Tensor] = inputs) -> Tensor:
            return [each(inputs[each.in_features]) for each in matrices][-1]

        record.timed(_graph(multiply).replay if target.device.type == "cuda" else multiply, part="products", rows=count)


def _graph(forward: Callable[[], Tensor]) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph


# -- the verifier's engine ---------------------------------------------------------------------


class _WaitingPass:
    """Time a pass, the device synchronised; the rest of a step is the engine's own work."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.seconds = inner, 0.0

    def forward(self, pieces: Sequence[Any]) -> tuple[Tensor, int]:
        return self._timed(self._inner.forward, pieces)

    def logits(self, parts: Sequence[Tensor]) -> Any:
        return self._timed(self._inner.logits, parts)

    def _timed(self, run: Callable[[Any], Any], argument: Any) -> Any:
        began = time.perf_counter()
        result = run(argument)
        if self._inner.device == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began
        return result


@contextmanager
def engine_of(target: Target, part: str, tokens: int) -> Iterator[LocalEngine]:
    """Yield the verifier's engine with the pass ``part`` ("fused" or "general") and a cache of ``tokens`` tokens.

    Raises:
        RuntimeError: the engine refuses the fused pass for this target.
    """
    dtype = str(target.model.dtype).removeprefix("torch.")
    gc.collect()  # frees the weights of an earlier engine
    wanted = (
        patch("moa_server.engine.torch_engine.misfit", return_value="forced") if part == "general" else nullcontext()
    )
    with wanted:
        engine = torch_engine(target, dtype=dtype, cache_tokens=tokens)
    if type(engine.target_pass).__name__ != {"fused": "FusedLlama", "general": "GeneralPass"}[part]:
        raise RuntimeError(f"the engine took {type(engine.target_pass).__name__}")
    try:
        yield engine
    finally:
        engine.close()


def _text(engine: LocalEngine, number: int, count: int) -> list[int]:
    return [(7919 * position + number) % engine.vocab_size for position in range(count)]


def measure_engine(
    target: Target, part: str, record: Record, context: int, sessions: Sequence[int], rows: Sequence[int]
) -> None:
    """Time whole steps: each session verifies a draft of ``rows - 1`` arbitrary tokens, nearly all of them wrong."""
    with engine_of(target, part, max(sessions) * (context + 192)) as engine:
        numbers = [new_sequence() for _ in range(max(sessions))]
        texts = [_text(engine, number, context + max(rows)) for number in numbers]
        for number, text in zip(numbers, texts, strict=True):
            engine.step_now([StepRequest(number, text[:context], expected=context + max(rows))])
        for count in sessions:
            for new in rows:
                some = list(zip(numbers, texts, strict=True))[:count]
                requests = [
                    StepRequest(n, text[:context], text[context : context + new - 1], chain(new - 1), Sampling())
                    for n, text in some
                ]
                sizes = {"context": context, "sessions": count, "rows": new}
                record.timed(lambda requests=requests: engine.step_now(requests), part=part, **sizes)
            _split(engine, requests, record, part, {**sizes, "rows": new})


def _split(engine: LocalEngine, requests: list[StepRequest], record: Record, part: str, sizes: Any) -> None:
    """Add one step's share of the pass, and on a GPU its kernels."""
    own = engine.target_pass
    engine.target_pass = waiting = _WaitingPass(own)
    began = time.perf_counter()
    engine.step_now(requests)
    whole = time.perf_counter() - began
    engine.target_pass = own
    split = {"step_ms": round(1000 * whole, 3), "pass_ms": round(1000 * waiting.seconds, 3)}
    if own.device == "cuda":
        split |= _kernels(lambda: engine.step_now(requests))
    record.add(part=f"{part}: of a step", **sizes, **split)


def _kernels(run: Callable[[], object]) -> dict[str, float]:
    """Count the kernels and copies of one run, and the milliseconds that they keep the GPU busy."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.self_device_time_total for event in events) / 1000
    return {"kernels": len(events), "busy_ms": round(busy, 3)}


def measure_prefill(target: Target, record: Record, sizes: Sequence[int]) -> None:
    """Time prompts of new sequences up to the first token, in the engine's own chunks."""
    with engine_of(target, "fused", max(sizes) + 192) as engine:
        for size in sizes:
            text = _text(engine, 1, size)

            def run(text: list[int] = text) -> None:
                number = new_sequence()
                engine.step_now([StepRequest(number, text, sampling=Sampling())])
                engine.release(number)

            record.timed(run, part="prefill", tokens=size)


# -- the drafter -------------------------------------------------------------------------------


@torch.inference_mode()
def measure_drafter(
    target: Target, shape: str, record: Record, context: int, sessions: Sequence[int], widths: Sequence[int]
) -> None:
    """Time a drafting level, and the memory rows of new tokens.

    Args:
        widths: nodes that each session continues in a level.
    """
    drafter, dtype = random_drafter(shape, target), target.model.dtype
    half = PackedDeviceModule(drafter, target, dtype, top_k=TOP_K)
    for count in sessions:
        for width in widths:
            inputs = [_level(half, target, context, width) for _ in range(count)]
            sizes = {"context": context, "sessions": count, "rows": width}
            record.timed(lambda inputs=inputs: half.steps(inputs), part="drafter", **sizes)
            moving = lambda inputs=inputs: Batch(inputs, drafter.angles, half.kv_shape[0], target.device)  # noqa: E731
            record.timed(moving, part="drafter: inputs to the device", **sizes)
    if target.device.type == "cuda":
        inputs = [_level(half, target, context, 1)]
        record.add(
            part="drafter: of a level", context=context, sessions=1, rows=1, **_kernels(lambda: half.steps(inputs))
        )
    _measure_rows(target, MemoryRows(drafter, dtype), record, context, sessions)


def _level(half: PackedDeviceModule, target: Target, context: int, width: int) -> StepInputs:
    rng = np.random.default_rng(0)
    caches = [rng.standard_normal((context, *half.kv_shape), np.float32) for _ in range(4)]  # two are memory rows
    return StepInputs(
        rng.integers(target.config.vocab_size, size=width),
        np.full(width, context, np.int64),
        np.arange(width, dtype=np.int64),
        *caches[:2],
        np.concatenate((np.ones((width, context), np.bool_), np.eye(width, dtype=np.bool_)), axis=1),
        *caches[2:],
    )


def _measure_rows(target: Target, memory: MemoryRows, record: Record, context: int, sessions: Sequence[int]) -> None:
    with engine_of(target, "fused", 256) as engine:
        new_cache = engine.target_pass.cache_shape.new_cache
    caches = [new_cache(context) for _ in range(max(sessions))]
    for half in (half for cache in caches for half in (cache.keys, cache.values)):
        half.normal_()
    for count, new in [*((count, new) for count in sessions for new in (1, 4)), (1, context)]:
        spans = [Span(cache, context - new, context) for cache in caches[:count]]
        record.timed(
            lambda spans=spans: memory.of(spans), part="memory rows", context=context, sessions=count, rows=new
        )


def _copy_rate(record: Record) -> dict[str, float]:
    """Measure a copy of 4 GB: bytes read and written a second."""
    source = torch.empty(2**31, device="cuda", dtype=torch.bfloat16)
    copy = torch.empty_like(source)
    return {"copy_tb_s": round(2 * source.nbytes / record.least_ms(lambda: copy.copy_(source)) / 1e9, 2)}


# -- the command line --------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return exit status 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    numbers = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the target (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts (default %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each session (default %(default)s)")
    parser.add_argument("--sessions", type=numbers, default=[1, 4, 8], metavar="N,...", help="in a step")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4], metavar="N,...", help="of each session in a step")
    parser.add_argument("--product-rows", type=numbers, default=[1, 4, 16], metavar="N,...", help="of products alone")
    parser.add_argument("--prompts", type=numbers, default=[64], metavar="N,...", help="tokens of prompts")
    parser.add_argument("--repeats", type=int, default=10, help="steps of each kind (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures, a JSON object a line")
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    target = random_target(options.shape, options.device, getattr(torch, options.dtype))
    record = Record(target.device, options.repeats, {"shape": options.shape, "dtype": options.dtype}, options.json)
    if target.device.type == "cuda":
        record.add(part="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, **_copy_rate(record))
    grid = (options.context, options.sessions, options.rows)
    if "bare" in parts:
        measure_bare(target, record, *grid)
    if "products" in parts:
        measure_products(target, record, options.product_rows)
    for part in ("general", "fused"):
        if part in parts:
            measure_engine(target, part, record, *grid)
    if "prefill" in parts:
        measure_prefill(target, record, options.prompts)
    if "drafter" in parts:
        measure_drafter(target, options.shape, record, *grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
