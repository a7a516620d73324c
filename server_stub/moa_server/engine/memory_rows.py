"""Memory rows: computed by the drafter's server half from the target's states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import Eagle3Config, Reads, drafter_fingerprint
from moa_drafter.drafter import Drafter
from moa_drafter.llama import KeysValues
from moa_drafter.model import MoADrafter
from moa_drafter.target_features import TargetStates
from moa_server.drafting.batched_model import PackedRows
from moa_server.engine.base import Rows, Span, chunks

#: Rows computed at once; bounds the memory they take.
CHUNK = 512


def load_drafter(folder: Path | None, device: str) -> tuple[Drafter | None, str]:
    """Load a checkpoint for a device; return it with its fingerprint, or None and nothing without a folder.

    Raises:
        MoaError: it is missing or unreadable.
    """
    if folder is None:
        return None, ""
    return load_checkpoint(folder).to(torch.device(device)), drafter_fingerprint(folder)


class MemoryRows:
    """Makes the memory rows of all sequences of a step at once: most need a row or two, and share the matrix reads.

    Args:
        drafter: None, or one that reads nothing of the target, makes no rows.
        dtype: of the products, if the drafter leaves the choice.
    """

    def __init__(self, drafter: Drafter | None, dtype: torch.dtype) -> None:
        self._drafter, self.reads = drafter, Reads() if drafter is None else drafter.row_reads
        config = None if drafter is None else drafter.config
        self._halves = (2, *config.row_shape) if isinstance(config, Eagle3Config) else ()
        self._packed = PackedRows(drafter, dtype) if isinstance(drafter, MoADrafter) else None

    @torch.inference_mode()
    def of(self, spans: Sequence[Span | None]) -> list[Rows | None]:
        """Return the rows of each span, None for None; except for rounding they do not depend on the other spans."""
        if self._drafter is None or not self.reads:
            return [None] * len(spans)
        compute, weight = self._packed or self._cut, next(self._drafter.parameters())
        found: dict[Span, list[KeysValues]] = {span: [] for span in spans if span is not None}
        for parts in chunks(list(found), CHUNK):
            states = _joined([_states(part, self.reads) for _, part in parts]).to(weight.device).to(weight.dtype)
            positions = torch.cat([torch.arange(part.start, part.stop) for _, part in parts]).to(weight.device)
            counts = [part.stop - part.start for _, part in parts]
            keys, values = (half.split(counts) for half in compute(states, positions))
            for (span, _), *both in zip(parts, keys, values, strict=True):
                found[span].append((both[0], both[1]))
        return [None if span is None else _rows(span.start, found[span]) for span in spans]

    def _cut(self, states: TargetStates, positions: Tensor) -> KeysValues:
        """The rows of EAGLE-3: features, in two halves."""
        first, second = states.last.unflatten(-1, self._halves).unbind(-3)
        return first, second


def _rows(start: int, parts: Sequence[KeysValues]) -> Rows:
    keys, values = (torch.cat(halves).float().cpu().numpy() for halves in zip(*parts, strict=True))
    return Rows(start, keys, values)


def _states(span: Span, reads: Reads) -> TargetStates:
    """Return the states of a span that rows are made of: keys and values, or features as ``last``."""
    held, start, stop = span.held, span.start, span.stop
    given = held.read(reads.kv_layers, start, stop) if reads.kv_layers else held.features[start:stop]
    nothing = given.new_empty(stop - start, 0, 0)
    if reads.kv_layers:
        return TargetStates(given, nothing, nothing.flatten(1))
    return TargetStates(nothing, nothing, given)


def _joined(states: Sequence[TargetStates]) -> TargetStates:
    if len(states) == 1:
        return states[0]
    return TargetStates(*(torch.cat([getattr(each, part) for each in states]) for part in ("kv", "inner", "last")))
