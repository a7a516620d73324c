"""The offline writer for Core ML computes what its description says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moa_decoder.rounded_weights import RoundedWeights
from moa_export.errors import ExportError
from moa_export.graph_files import write_web_writer
from moa_export.recipe import Recipe
from moa_export.targets.base import TargetOptions
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import writer_backend
from support.export.rounded import rounded_model
from support.export.writers import CAPPED, compare, described, make_proved_bundle, stepped, write_alike
from support.late import Late
from support.refusals import refused

coreml = Late("moa_export.targets.coreml")
OPTIONS = TargetOptions(context=128)


def made(weights: RoundedWeights, folder: Path) -> Backend:
    exporter = coreml.CoremlTarget(Recipe(), OPTIONS)
    return exporter.writer_runner(folder, exporter.export_writer(weights, folder))


@pytest.mark.parametrize(("bits", "otherwise"), [(4, {}), (8, CAPPED)])
def test_the_program_computes_what_its_rounded_weights_do(target, tiny_target, tmp_path, bits, otherwise):
    weights = described(tiny_target, bits, **otherwise)
    ours = made(weights, tmp_path)
    theirs = writer_backend(tmp_path, write_web_writer(weights, tmp_path), threads=1)  # which multiplies floats
    # Floats are rounded to 16 bits.
    compare(ours, theirs, logprobs=0.02, keys=0.02, values=0.02)
    long = [(7 * n) % 500 for n in range(45)]
    assert stepped(ours, long).top_tokens.shape == (1, ours.top_k)
    if not otherwise:
        write_alike(ours, rounded_model(target, weights), tie=0.05)


@pytest.mark.slow
def test_a_bundle_has_a_proved_writer(tiny_target, tiny_drafter, tmp_path, capsys):
    make_proved_bundle(tmp_path / "bundle", tiny_target, tiny_drafter, "coreml", capsys)


def test_the_same_weights_give_the_same_package(tiny_target, tmp_path):
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        coreml.CoremlTarget(Recipe(), OPTIONS).export_writer(described(tiny_target, 4), tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append([path.read_bytes() for path in files])
    assert digests[0] == digests[1]


def test_what_it_cannot_write_is_refused(tiny_target, tmp_path):
    with refused("unsupported_writer", ExportError):
        made(described(tiny_target, 8, windows=(4,)), tmp_path)
