"""Which program runs the target where it writes conversations: vLLM where it is installed, transformers elsewhere."""

from __future__ import annotations

import importlib.util

from moa_drafter import vllm_environment
from moa_drafter.target import Target
from moa_drafter.training.decoding import Decoder, TransformersDecoder
from moa_drafter.training.settings import GenerateSettings, SettingsT, for_writer
from moa_runtime.errors import MoaError


def resolved(settings: SettingsT, device: str) -> SettingsT:
    """The settings with a writer in place of ``auto``, and with its own values where they leave something to it.

    What is installed decides, and no trial: the same command writes the same texts wherever the same is installed.
    """
    writer = settings.writer
    if writer == "auto":
        found = vllm_environment.installed() if _is_there() else None
        fits = found is not None and found.device == device.partition(":")[0]
        writer = "vllm" if fits else "transformers"
    return for_writer(settings, writer)


def check_installed(settings: GenerateSettings) -> None:
    """Raises MoaError: the writer is not installed."""
    if settings.writer == "vllm" and not _is_there():
        raise MoaError(
            "writer vllm needs vLLM, which is not installed here: choose --writer transformers, or install it in an "
            'environment of its own, pip install "moa-edge[vllm]" (vllm-cuda for CUDA)'
        )


def open_decoder(target: Target, settings: GenerateSettings) -> Decoder:
    """The decoder of the writer that :func:`resolved` found.

    Raises:
        MoaError: it is not installed, or cannot run the target, or not here.
    """
    check_installed(settings)
    if settings.writer == "transformers":
        return TransformersDecoder(target)
    vllm_environment.prepare()  # before vLLM is imported
    from moa_drafter.training.vllm_decoder import VllmDecoder

    return VllmDecoder(target, settings)


def _is_there() -> bool:
    return importlib.util.find_spec("vllm") is not None
