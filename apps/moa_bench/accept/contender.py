"""What is measured: drafters, each with its two ends, and what is to be known of them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_bench.accept.measure import Results
from moa_bench.checkpoints import checkpoint_pair, without_model
from moa_bench.inprocess import Device, device_of, engine_of
from moa_bench.options import bundle_of
from moa_bench.result import rounded
from moa_drafter.checkpoint_files import CHECKPOINT_FOLDER
from moa_drafter.pretrained import checkpoint_of
from moa_runtime.datastore.reader import Datastore
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.memory_rows import encode_rows
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import new_sequence
from moa_server.engine.blocking import BlockingEngine
from moa_server.scheduling.verify_job import Job

if TYPE_CHECKING:
    from moa_server.engine.transformers import TransformersEngine

CHECKPOINT = "float32 checkpoint"
NO_MODEL = "none"


@dataclass
class Contender:
    """A drafter to measure.

    Attributes:
        name: for people; no path.
        weights: what drafts, ``"bundle"``, :data:`CHECKPOINT` or :data:`NO_MODEL`.
        target: the target's name.
        results: of the rounds measured so far.
    """

    name: str
    weights: str
    target: str
    device: Device
    engine: TransformersEngine
    results: Results

    def figures(self) -> dict[str, Any]:
        """What was measured, and what it was measured of; plain values for JSON.

        ``parameters`` are those of the checkpoint, ``frozen_parameters`` those of the target's layers that a step
        runs besides, ``row_bytes`` what a token's row takes on the wire (int8), ``draft_ms`` the mean time of a draft,
        ``target_passes`` forwards of the target, those over questions included.
        """
        drafter = self.engine.drafter
        return {
            "name": self.name,
            "architecture": drafter.config.architecture if drafter else self.name,
            "weights": self.weights,
            "parameters": sum(tensor.numel() for tensor in drafter.parameters()) if drafter else 0,
            "frozen_parameters": drafter.frozen_parameters if drafter else 0,
            "row_bytes": row_bytes(self.engine),
            **self.results.total.as_dict(),
            "tau": rounded(self.results.tau),  # the mean over tasks, where the tally's is over rounds
            "tasks": {name: tally.as_dict() for name, tally in self.results.tasks.items()},
            "draft_ms": rounded(self.results.draft_ms, 2),
            "target_passes": self.results.target_passes,
        }


def contenders_of(args: argparse.Namespace, draft_length: int) -> list[Contender]:
    """The drafter that ``--bundle`` or ``--drafter`` name, then those of ``--against``.

    Args:
        draft_length: tokens of the longest draft, or levels of the deepest tree.

    Raises:
        MoaError: what cannot be found, read, or does not fit together.
    """
    # Imported late: this brings torch, and --help should answer at once.
    from moa_drafter.target import load_target
    from moa_drafter.target_source import DEFAULT_TARGET

    model, against = args.model or DEFAULT_TARGET, [_place(given) for given in args.against or ()]
    if args.datastore is not None and not args.ngrams and not any(map(without_model, (args.drafter, *against))):
        raise MoaError("--datastore is copied from where n-grams are: leave out one of it and --no-ngrams")
    if args.bundle is not None or (args.drafter is None and not against):
        bundle = bundle_of(args)
        datastore = None
        if args.datastore is not None:
            datastore = Datastore.open(args.datastore, bundle.manifest.fingerprints.tokenizer)
        device = device_of(bundle, args.backend, ngrams=args.ngrams, datastore=datastore)
        engine = engine_of(args)
        ends = [("bundle", "bundle", bundle.manifest.target, device, engine)]
        target = engine.target
        places = against
    else:
        if args.backend is not None:
            raise MoaError("--backend chooses among the graphs of a bundle: add --bundle")
        first = _place(args.drafter)
        if args.drafter is None:  # the default one is not measured twice
            against = [place for place in against if place != first]
        ends, target = [], load_target(model)
        places = [first, *against]
    target_name = Path(model).resolve().name if Path(model).is_dir() else model  # no path of this machine
    ends += [
        (
            _name(place),
            NO_MODEL if without_model(place) else CHECKPOINT,
            target_name,
            *checkpoint_pair(place, target, ngrams=args.ngrams, datastore=args.datastore),
        )
        for place in places
    ]
    names = _distinct([name for name, *_ in ends])
    return [Contender(name, *rest, Results(draft_length)) for name, (_, *rest) in zip(names, ends, strict=True)]


def row_bytes(engine: TransformersEngine) -> int:
    """Bytes of one token's row on the wire, int8 with its scales; 0 where none travel."""
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
    """What a user named: the name of a drafter without a model, or a checkpoint's folder. Raises MoaError."""
    return without_model(given or "") or checkpoint_of(given)


def _name(place: str | Path) -> str:
    """The drafter's name, or the folder's; that of the run where it is moa-train's ``OUT/drafter``."""
    if isinstance(place, str):
        return place
    place = place.resolve()
    return place.parent.name if place.name == CHECKPOINT_FOLDER and place.parent.name else place.name


def _distinct(names: Sequence[str]) -> list[str]:
    """The same names, a number behind those that came before: ``["a", "a"]`` becomes ``["a", "a (2)"]``."""
    return [
        name if name not in names[:at] else f"{name} ({1 + names[:at].count(name)})" for at, name in enumerate(names)
    ]
