"""The on-device runtime of moa-edge: everything that ships to a device, without torch.

The names of ``__all__`` are the public API. Each is imported when it is first used, so that importing the package
loads nothing.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moa_runtime.bundle import Bundle
    from moa_runtime.chat import Chat
    from moa_runtime.errors import ChatError, MoaError
    from moa_runtime.events import (
        AnswerFinished,
        AnswerUpdate,
        ChatEvent,
        Disagreement,
        FinishReason,
        LinkChanged,
        LinkStatus,
        Origin,
        Paused,
        PauseReason,
        Statistics,
        TextSpan,
        TokenLogprobs,
        TokenOrigin,
    )
    from moa_runtime.options import Conditions, LoopSettings
    from moa_runtime.paths import default_bundle
    from moa_runtime.session.events import Policy, Sampling
    from moa_runtime.sync import SyncChat
    from moa_runtime.transport import Endpoint

__all__ = [
    "AnswerFinished",
    "AnswerUpdate",
    "Bundle",
    "Chat",
    "ChatError",
    "ChatEvent",
    "Conditions",
    "Disagreement",
    "Endpoint",
    "FinishReason",
    "LinkChanged",
    "LinkStatus",
    "LoopSettings",
    "MoaError",
    "Origin",
    "PauseReason",
    "Paused",
    "Policy",
    "Sampling",
    "Statistics",
    "SyncChat",
    "TextSpan",
    "TokenLogprobs",
    "TokenOrigin",
    "default_bundle",
]

#: Modules of the public names that are not in ``moa_runtime.events``.
_MODULES = {
    "Bundle": "moa_runtime.bundle",
    "Chat": "moa_runtime.chat",
    "ChatError": "moa_runtime.errors",
    "Conditions": "moa_runtime.options",
    "Endpoint": "moa_runtime.transport",
    "LoopSettings": "moa_runtime.options",
    "MoaError": "moa_runtime.errors",
    "Policy": "moa_runtime.session.events",
    "Sampling": "moa_runtime.session.events",
    "SyncChat": "moa_runtime.sync",
    "default_bundle": "moa_runtime.paths",
}

# onnxruntime's wheels send reports about the machine to Microsoft, and read this once, when they are imported. Here it
# precedes every import of theirs in our programs, which all import this package, and their child processes inherit it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "moa_runtime.events")), name)
