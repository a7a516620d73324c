"""Types of the target's numbers: what ``--dtype`` means for a target on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moa_server.engine.base import EngineError

#: Those that ``--dtype`` takes.
DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
#: Bits of the types that need no torch on a processor.
BITS: dict[str, Literal[4, 8, 32]] = {"float32": 32, "int8": 8, "int4": 4}
#: Most that rounding a checkpoint to 8 or 4 bits may multiply its perplexity by.
MOST_RATIO = 1.02
#: CPU flags of Linux that stand for instructions with bfloat16.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Return whether this processor multiplies in bfloat16; None if it cannot be told."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def cpu_dtype(wanted: str, stored: str, *, quantised: bool, torch: bool, bfloat16: bool | None) -> str:
    """Return the type in which a target is computed on a processor.

    Never by timing: "auto" is that of a quantised file, otherwise float32, or bfloat16 if the checkpoint is in bfloat16
    and the processor has instructions for it.

    Args:
        wanted: one of :data:`DTYPES`.
        stored: the checkpoint's own type.
        quantised: whether it is a quantised GGUF file.
        torch: whether torch is installed, which bfloat16 needs.
        bfloat16: see :func:`has_bfloat16`.

    Raises:
        EngineError: ``unsupported_type`` if this target or processor has no such type.
    """
    if wanted == "auto":
        return stored if quantised else "bfloat16" if stored == "bfloat16" and torch and bfloat16 else "float32"
    if wanted == "bfloat16" and bfloat16 is False:
        text = "this processor has no instructions for bfloat16, which would take over a second a token here: choose"
        raise EngineError(f"{text} --dtype auto, float32, int8 or int4", code="unsupported_type")
    if quantised and wanted in ("int8", "int4") and wanted != stored:
        text = f"the file's own numbers are in {stored}, and are not rounded again to {wanted}: choose --dtype auto"
        raise EngineError(f"{text}, float32, or another file", code="unsupported_type")
    return wanted
