"""What ``moa-serve --doctor`` tells of the machine."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

import torch

from moa_runtime.cpus import available_cpus
from moa_server.doctor import Facts, Machine
from moa_server.edge.server import ceiling, raise_descriptor_limit
from moa_server.engine.base import EngineFacts
from moa_server.engine.packed_linear import product

#: CPU flags of Linux that stand for instructions with bfloat16.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
#: Rows and size of the products that two types are compared by: larger than most caches, as a target is.
_ROWS, _SIZE, _REPEATS = (1, 16), 4096, 5


def this_machine() -> Machine:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if not gpu and torch.backends.mps.is_available():
        gpu = "Apple (mps)"
    return Machine(available_cpus(), torch.get_num_threads(), gpu, _native_bfloat16(), _resident_bytes())


def facts(engine: EngineFacts, connections: int, max_sessions: int) -> Facts:
    """What the report says of a loaded engine.

    Args:
        connections: that shall be held at once.
    """
    descriptors = raise_descriptor_limit()
    return Facts(
        **asdict(engine),
        descriptors=descriptors,
        connections=ceiling(connections, descriptors),
        max_sessions=max_sessions,
        bfloat16_share=bfloat16_share() if (engine.dtype, engine.device) == ("float32", "cpu") else None,
    )


def bfloat16_share() -> float:
    """Time of products in bfloat16, relative to float32's, on this CPU; the worse of those of 1 and 16 tokens."""
    return max(_seconds(torch.bfloat16, rows, _SIZE) / _seconds(torch.float32, rows, _SIZE) for rows in _ROWS)


@torch.inference_mode()
def _seconds(dtype: torch.dtype, rows: int, size: int) -> float:
    multiply = product(torch.ones(size, size, dtype=dtype))
    values = torch.ones(rows, size, dtype=dtype)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        multiply(values)
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)


def _native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def _resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
