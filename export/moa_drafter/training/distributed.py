"""Several processes, started by torchrun, that train one drafter: each holds all of it and exchanges gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def count() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process; number 0 writes files and reports."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the processes that torchrun started, if any; yields the device, this process's own GPU for ``cuda``."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def first_alone() -> Iterator[None]:
    """Let process 0 run the block before the others."""
    if rank() and count() > 1:
        dist.barrier()
    yield
    if not rank() and count() > 1:
        dist.barrier()


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if count() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def copy_from(owners: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by that of the process that owns it."""
    if count() > 1:
        for owner, tensor in zip(owners, tensors, strict=True):
            dist.broadcast(tensor.detach(), owner)  # into the same memory


def copy_from_first(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by process 0's."""
    copy_from([0] * len(tensors), tensors)
