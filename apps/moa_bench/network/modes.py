"""The ways of serving there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moa_bench.network.answer import Mode, Turn
from moa_bench.network.chatted import ChatMode
from moa_bench.network.oracle import OracleDrafter
from moa_bench.network.settings import NetworkSettings
from moa_bench.network.streamed import StreamMode
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.options import Drafting
from moa_runtime.timeline import NO_TIMELINE, Timeline


def make_modes(
    names: Sequence[str], bundle: Bundle, settings: NetworkSettings, timeline: Timeline = NO_TIMELINE
) -> dict[str, Mode]:
    """Those of :data:`moa_bench.network.command.MODES` that are called ``names``, in the order of ``names``.

    Args:
        timeline: gets what the device does in the modes that draft.

    Raises:
        MoaError: the bundle's graph cannot be loaded.
    """

    def chat(new_drafter: Callable[[Turn], Drafter | None], drafting: Drafting = "device") -> Mode:
        return ChatMode(bundle, new_drafter, settings, drafting, timeline)

    def ours() -> Callable[[Turn], Drafter]:
        backend = load_backend(bundle, threads=settings.threads)
        # The graph is shared; each answer has caches of its own.
        return lambda turn: drafter_for(bundle.manifest, backend)

    makers: dict[str, Callable[[], Mode]] = {
        "stream": lambda: StreamMode(settings),
        "per-call": lambda: chat(lambda turn: None),
        "device": lambda: chat(ours()),
        "server": lambda: chat(ours(), "server"),
        "auto": lambda: chat(ours(), "auto"),
        "oracle": lambda: chat(lambda turn: OracleDrafter(len(turn.prompt), turn.reference)),
    }
    return {name: makers[name]() for name in names}
