"""GGUF files: the parts of a split one, joining them, and comparing the tensors with the model that was made of them.

``gguf`` is imported late: a target that was made before is found again without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_drafter.target_error import TargetError
from moa_drafter.weight_faults import WEIGHTS_DIFFER, WeightFaults

if TYPE_CHECKING:
    from gguf import GGUFReader

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_NUMBER, _SPLIT_COUNT = "split.no", "split.count"


def parts_of(file: Path) -> list[Path]:
    """Find all parts of a GGUF file by the name of any of them, in their order; a file that is not split is its own.

    Raises:
        TargetError: one is missing, with the code ``part_missing``.
    """
    named = _PART.fullmatch(file.name)
    count = int(named["count"]) if named else 0
    if named is None or not 1 <= int(named["number"]) <= count:
        return [file]
    parts = [file.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TargetError(
            f"{file.name} is one of {count} parts of a model, and these are missing: {', '.join(missing[:3])}{more}; "
            f"put all parts into {file.parent}",
            code="part_missing",
        )
    return parts


def read_parts(parts: Sequence[Path]) -> list[GGUFReader]:
    """Open the parts of a GGUF file, each at its place.

    Raises:
        TargetError: a file is damaged, with the code ``damaged``; or it is another part, or one of another number of
            parts, than its name says, with the code ``part_misplaced``.
    """
    from gguf import GGUFReader

    readers = []
    for number, part in enumerate(parts):
        try:
            reader = GGUFReader(part)
        except (LookupError, ValueError) as error:
            raise TargetError(
                f"cannot read {part.name}: it is damaged, or no GGUF file; fetch it again", code="damaged"
            ) from error
        # A file that was never split has neither field.
        found = tuple(_number(reader, key, unsplit) for key, unsplit in ((_SPLIT_NUMBER, 0), (_SPLIT_COUNT, 1)))
        if found != (number, len(parts)):
            raise TargetError(
                f"{part.name} holds part {found[0] + 1} of {found[1]}, not part {number + 1} of {len(parts)}: give it "
                f"the name it had, ending in -{found[0] + 1:05}-of-{found[1]:05}.gguf",
                code="part_misplaced",
            )
        readers.append(reader)
    return readers


def join(readers: Sequence[GGUFReader], whole: Path) -> None:
    """Write the parts of a GGUF file as one file: the first part's metadata, and the tensors of all.

    Raises:
        ValueError: two parts have a tensor of the same name.
    """
    from gguf import GGUFValueType, GGUFWriter

    fields = dict(readers[0].fields)
    writer = GGUFWriter(whole, fields["general.architecture"].contents(), endianess=readers[0].endianess)
    writer.data_alignment = readers[0].alignment
    for name, value in fields.items():
        if not name.startswith(("GGUF.", "split.", "general.architecture")):  # what the writer says itself
            items = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], sub_type=items)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def check_whole(name: str, readers: Sequence[GGUFReader], model: Any, loading_info: dict[str, Any]) -> None:
    """Compare a model that transformers made of a GGUF file with what the file holds.

    transformers fills up what is missing with random numbers. Its older reader, which most architectures still take,
    does not report tensors that it has no place for, nor missing halves of experts, which become zeros: those show in
    the count of all numbers.

    Raises:
        TargetError: they differ, with the code ``weights_differ``.
    """
    faults: object = WeightFaults.reported(loading_info)
    newer_reader = getattr(getattr(model, "hf_quantizer", None), "supported", False)
    held = sum(int(tensor.n_elements) for reader in readers for tensor in reader.tensors)
    # Tied tensors are one.
    wanted = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    if not (faults or newer_reader) and held != wanted:
        faults = _unplaced(readers, model) or f"{held:,} numbers instead of {wanted:,}"
    if faults:
        raise TargetError(
            f"the tensors of {name} are not those of the model that its metadata describes: {faults}; take another "
            "file, or the model's folder or Hub id",
            code=WEIGHTS_DIFFER,
        )


def _number(reader: GGUFReader, key: str, default: int) -> int:
    return int(reader.fields[key].contents()) if key in reader.fields else default


def _unplaced(readers: Sequence[GGUFReader], model: Any) -> WeightFaults:
    """Compare the names of a file's tensors with those that transformers looks for."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(readers[0].fields["general.architecture"].contents(), TensorProcessor)
    places = get_gguf_hf_weights_map(model, processor(config={}))
    # Places of experts, several matrices in one, have no suffix.
    known = {name.removesuffix(".weight") for name in places}
    wanted = {name.removesuffix(".weight") for name, at in places.items() if at not in model.all_tied_weights_keys}
    held = {tensor.name.removesuffix(".weight") for reader in readers for tensor in reader.tensors}
    return WeightFaults(frozenset(wanted - held), frozenset(held - known))
