"""What ``--dtype`` means on a processor."""

from __future__ import annotations

import pytest

from moa_server.engine.base import EngineError
from moa_server.engine.dtypes import cpu_dtype, has_bfloat16
from support.refusals import refused


@pytest.mark.parametrize(
    ("wanted", "stored", "machine", "chosen"),
    [
        ("auto", "int4", {"quantised": True}, "int4"),
        ("auto", "int8", {"quantised": True, "torch": False}, "int8"),
        ("auto", "float32", {}, "float32"),
        ("auto", "bfloat16", {}, "bfloat16"),
        ("auto", "bfloat16", {"torch": False}, "float32"),
        ("auto", "bfloat16", {"bfloat16": False}, "float32"),
        ("auto", "bfloat16", {"bfloat16": None}, "float32"),
        ("auto", "float16", {}, "float32"),
        ("float32", "int4", {"quantised": True}, "float32"),
        ("int4", "int4", {"quantised": True}, "int4"),
        ("int8", "bfloat16", {}, "int8"),
        ("bfloat16", "float32", {"bfloat16": None}, "bfloat16"),
    ],
)
def test_the_type_follows_from_checkpoint_and_processor(wanted, stored, machine, chosen):
    assert cpu_dtype(wanted, stored, **{"quantised": False, "torch": True, "bfloat16": True, **machine}) == chosen


@pytest.mark.parametrize(("wanted", "stored"), [("bfloat16", "float32"), ("int4", "int8"), ("int8", "int4")])
def test_types_that_cannot_be_had_are_refused(wanted, stored):
    with refused("unsupported_type", EngineError):
        cpu_dtype(wanted, stored, quantised=stored != "float32", torch=True, bfloat16=False)


@pytest.mark.parametrize(
    ("flags", "known"),
    [("flags : sse4_2 avx512_bf16", True), ("Features : fp asimd bf16", True), ("flags : avx2", False)],
)
def test_instructions_for_bfloat16_are_read_off_the_processors_flags(tmp_path, flags, known):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert has_bfloat16(tmp_path / "cpuinfo") is known
    assert has_bfloat16(tmp_path / "missing") is None
