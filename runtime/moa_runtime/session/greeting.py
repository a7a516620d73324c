"""What a Welcome says to a Hello."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits, digest
from moa_runtime.wire.moa.v1 import session_pb2 as wire


def marks_known(resume: wire.Resume, committed: Sequence[int]) -> int:
    """Tokens of the longest of the client's marks that the server has too; 0 for none."""

    def known(mark: wire.Mark) -> bool:
        return mark.length <= len(committed) and digest(committed[: mark.length]) == mark.digest

    return max((mark.length for mark in resume.marks[-2:] if known(mark)), default=0)


def goes_on(resume: wire.Resume, epoch: int, agreed: int) -> bool:
    """Whether the server has taken all that the client asked, in the same epoch."""
    return resume.answering and resume.epoch == epoch and 0 < agreed == resume.marks[-1].length


def welcome_of(limits: Limits, capabilities: Sequence[int]) -> wire.Welcome:
    """A Welcome that says what the verifier allows and can do."""
    return wire.Welcome(
        protocol_version=PROTOCOL_VERSION,
        limits=wire.Limits(
            max_context=limits.max_context,
            max_draft_tokens=limits.max_draft_tokens,
            max_frame_bytes=limits.max_frame_bytes,
            idle_seconds=limits.idle_seconds,
            chains_only=not limits.trees,
            away_seconds=limits.away_seconds,
            keep_seconds=limits.keep_seconds,
        ),
        capabilities=[wire.Capability.Name(each) for each in capabilities],
    )
