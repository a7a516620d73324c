"""The drafters that ``moa-bench accept`` compares, each with its device and its engine."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moa_bench.harness import Device, checkpoint_pair, device_of, engine_of, without_model
from moa_bench.options import bundle_of
from moa_drafter.config import CHECKPOINT_FOLDER
from moa_drafter.pretrained import checkpoint_of
from moa_runtime.datastore import Datastore
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.memory_rows import encode_rows
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import new_sequence
from moa_server.engine.baseline import BlockingEngine
from moa_server.scheduling.verify_job import Job

if TYPE_CHECKING:
    from moa_server.engine.transformers import TransformersEngine

CHECKPOINT = "float32 checkpoint"
NO_MODEL = "none"


@dataclass(frozen=True)
class Candidate:
    """A drafter to measure.

    Attributes:
        name: for people; no path.
        weights: ``"bundle"``, :data:`CHECKPOINT` or :data:`NO_MODEL`.
        target: the target's name.
    """

    name: str
    weights: str
    target: str
    device: Device
    engine: TransformersEngine

    def properties(self) -> dict[str, object]:
        """Return what the drafter is, for JSON.

        ``parameters`` are those of the checkpoint, ``frozen_parameters`` those of the target's layers that a step runs
        too, ``row_bytes`` the size of a token's memory row on the wire (int8).
        """
        drafter = self.engine.drafter
        return {
            "name": self.name,
            "architecture": drafter.config.architecture if drafter else self.name,
            "weights": self.weights,
            "parameters": sum(tensor.numel() for tensor in drafter.parameters()) if drafter else 0,
            "frozen_parameters": drafter.frozen_parameters if drafter else 0,
            "row_bytes": row_bytes(self.engine),
        }


def candidates_of(args: argparse.Namespace) -> list[Candidate]:
    """Load the drafter that ``--bundle`` or ``--drafter`` names, then those of ``--against``.

    Raises:
        MoaError: a file that cannot be found or read, or drafter and target that do not fit together.
    """
    # Imported late: this brings torch, and --help should answer at once.
    from moa_drafter.target import load_target
    from moa_drafter.target_source import DEFAULT_TARGET

    model, against = args.model or DEFAULT_TARGET, [_place(given) for given in args.against or ()]
    if args.datastore is not None and not args.ngrams and not any(map(without_model, (args.drafter, *against))):
        raise MoaError("--datastore is copied from together with n-grams: leave out --datastore or --no-ngrams")
    if args.bundle is not None or (args.drafter is None and not against):
        bundle = bundle_of(args)
        datastore = None
        if args.datastore is not None:
            datastore = Datastore.open(args.datastore, bundle.manifest.fingerprints.tokenizer)
        device = device_of(bundle, args.backend, ngrams=args.ngrams, datastore=datastore)
        engine = engine_of(args)
        found = [Candidate("bundle", "bundle", bundle.manifest.target, device, engine)]
        target, places = engine.target, against
    else:
        if args.backend is not None:
            raise MoaError("--backend chooses among the graphs of a bundle: add --bundle")
        first = _place(args.drafter)
        if args.drafter is None:  # the default drafter is not measured twice
            against = [place for place in against if place != first]
        found, target, places = [], load_target(model), [first, *against]
    target_name = Path(model).resolve().name if Path(model).is_dir() else model  # no path of this machine
    for place in places:
        weights = NO_MODEL if without_model(place) else CHECKPOINT
        ends = checkpoint_pair(place, target, ngrams=args.ngrams, datastore=args.datastore)
        found.append(Candidate(_distinct(_name(place), found), weights, target_name, *ends))
    return found


def row_bytes(engine: TransformersEngine) -> int:
    """Return the bytes of one token's memory row on the wire, int8 with its scales; 0 if none are sent."""
    if engine.drafter is None:
        return 0
    with contextlib.closing(BlockingEngine(engine)) as blocking:
        job = blocking.run(Job(new_sequence(), [0], Sampling(), rows_from=0))
        blocking.release(job.sequence)
    rows = job.rows
    if rows is None:
        return 0
    encoded = encode_rows(0, rows.keys, rows.values, wire.ROW_ENCODING_INT8)
    return len(encoded.data) + len(encoded.scales)


def _place(given: str | None) -> str | Path:
    """Return the name of a drafter without a model, or a checkpoint's folder. Raises MoaError."""
    return without_model(given or "") or checkpoint_of(given)


def _name(place: str | Path) -> str:
    """Return the drafter's name, or the folder's; for moa-train's ``OUT/drafter`` that of the run."""
    if isinstance(place, str):
        return place
    place = place.resolve()
    return place.parent.name if place.name == CHECKPOINT_FOLDER and place.parent.name else place.name


def _distinct(name: str, before: Sequence[Candidate]) -> str:
    """Number a name that occurred before: the second ``a`` is ``a (2)``."""
    same = sum(each.name == name or each.name.startswith(f"{name} (") for each in before)
    return f"{name} ({same + 1})" if same else name
