"""A target's configuration as transformers reads it, without its weights."""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from moa_decoder.checkpoint_fields import CHECKED, LARGEST, MOST_LAYERS, read_fields
from moa_decoder.checkpoint_weights import checkpoint_config, read_config
from moa_decoder.errors import TargetError
from moa_decoder.families import spec_of_config
from moa_decoder.text_part import is_multimodal
from moa_decoder.weight_faults import WEIGHTS_DIFFER

#: Codes of the errors after which transformers may still know the model.
UNDESCRIBED = frozenset({"unsupported_target", "unsupported_type", "missing_field", "wrong_type"})
#: Fields that count modules, or parts of them.
_COUNT = re.compile(r"(^|_)num_|_experts$")


def check_family(folder: Path) -> None:
    """Refuse a target that nothing here computes, by its configuration alone, before gigabytes of weights are fetched.

    Raises:
        TargetError: ``unsupported_target``, or what the configuration lacks.
    """
    try:
        spec_of_config(read_config(folder))
    except TargetError as error:
        general = all(importlib.util.find_spec(needed) is not None for needed in ("torch", "transformers"))
        if error.code not in UNDESCRIBED or (error.code == "unsupported_target" and not general):
            raise  # without torch its sentence names that
        if general:
            quiet_transformers()
            supported_config(folder)


def supported_config(folder: Path) -> Any:
    """Read transformers' configuration of text before the weights; code that comes with a model is never run. Raises
    TargetError if the architecture is not supported."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in CHECKED:
        if (folder / name).exists():
            read_fields(folder / name)
    own = read_config(folder)
    kind = own.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        raise unsupported(folder, kind)
    try:
        if is_multimodal(checkpoint_config(folder)):
            config = AutoConfig.for_model(**own)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        grouped = hasattr(CONFIG_MAPPING[kind](), "num_key_value_heads")  # whatever fields the file adds
    except Exception as error:  # classes have their own errors for impossible fields
        raise cannot_load(folder, error) from error
    # A model of several parts would have sizes of its class in place of those that this file lacks.
    if not grouped or config.get_text_config() is not config:
        raise unsupported(folder, kind)
    if getattr(config, "is_causal", True) is False:
        text = f"the target in {folder} is not supported: its tokens read later ones (is_causal is false)"
        raise TargetError(text, code="unsupported_target")
    for name, most in (("num_hidden_layers", MOST_LAYERS), ("max_position_embeddings", LARGEST)):
        if not 1 <= (getattr(config, name, None) or 0) <= most:
            raise cannot_load(folder, ValueError(f"{name} must be a whole number in 1..{most}"))
    return config


def check_counts(name: str, config: Any, shapes: Collection[Sequence[int]]) -> None:
    """Compare a configuration's counts of modules with the shapes of a file's tensors, before transformers makes the
    modules: a layer has a tensor of its own, and heads or experts are tensors of their own or lie along one.

    Args:
        name: of the file or folder, for the message.

    Raises:
        TargetError: ``weights_differ``.
    """
    count = len(shapes)
    most = max((size for shape in shapes for size in shape), default=0)
    counts = {each: value for each, value in vars(config).items() if _COUNT.search(each) and type(value) is int}
    for field, value in {**counts, "num_hidden_layers": getattr(config, "num_hidden_layers", 0)}.items():
        if value > (count if field == "num_hidden_layers" else max(count, most)):
            raise _differs(name, f"{field} is {value}, and they are {count} tensors whose largest size is {most}")


def check_room(name: str, config: Any, most: int) -> None:
    """Refuse a configuration whose model has more parameters than the ``most`` that a file can hold, before memory is
    taken for them. Raises TargetError as :func:`check_counts` does."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers has many errors for impossible sizes
        raise cannot_load(name, error) from error
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if numbers > most:
        raise _differs(name, f"its model has {numbers} parameters, and they hold at most {most}")


def _differs(name: str, how: str) -> TargetError:
    text = f"the weights in {name} are not those of its configuration: {how}; fetch the target again"
    return TargetError(text, code=WEIGHTS_DIFFER)


def unsupported(folder: Path, kind: object) -> TargetError:
    """Make the error for a target of the ``model_type`` ``kind``."""
    named = f"of the architecture {kind!r:.60}" if kind else "of no named architecture"
    return TargetError(
        f"the target in {folder} is {named}, which is not supported: docs/models.md lists the families that are",
        code="unsupported_target",
    )


def cannot_load(folder: Path | str, error: Exception) -> TargetError:
    """Make the error for a target that transformers, or a library that it uses, cannot load."""
    return TargetError(f"cannot load the target in {folder}: {error_line(error):.300}", code="unreadable")


def error_line(error: Exception) -> str:
    """Describe a library's error in one line, with its type unless libraries write sentences for that."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    told = text and isinstance(error, ImportError | OSError | RuntimeError | ValueError)
    return text if told else f"{type(error).__name__} {text}".strip()


def quiet_transformers() -> None:
    """Silence the bars and warnings of transformers, which would mix with our commands' output."""
    # An installed torchao, which transformers imports, warns of every GPU library that it cannot load.
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
