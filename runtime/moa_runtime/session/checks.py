"""What is wrong with a client's frame: the faults that answer it, and checks that give one, or None."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.handshake import Limits, fault
from moa_runtime.session.sampling import impossible, sampling_of, unknown
from moa_runtime.session.tree import TreeError, chain, check_parents
from moa_runtime.wire.moa.v1 import session_pb2 as wire


def unreached(position: int, committed: int) -> wire.ServerMessage:
    """A position behind what is committed."""
    text = f"position {position} was named, this conversation has {committed} tokens"
    return fault(wire.FAULT_CODE_OUT_OF_SYNC, text, committed_length=committed)


def no_answer(position: int, committed: int) -> wire.ServerMessage:
    """A frame of an answer that does not run."""
    text = f"no answer runs at position {position}"
    return fault(wire.FAULT_CODE_OUT_OF_SYNC, text, committed_length=min(committed, position))


def refused(message: wire.ClientMessage) -> wire.ServerMessage:
    """A frame that no client sends there."""
    event = message.WhichOneof("event")
    if event == "prompt":
        return fault(wire.FAULT_CODE_PROTOCOL, "another Prompt of the same epoch; each begins one of its own")
    return fault(wire.FAULT_CODE_PROTOCOL, f"a {event or 'empty'} event cannot follow the Hello of a connection")


def about(message: wire.ClientMessage, said: wire.ServerMessage) -> wire.ServerMessage:
    """What answers the frame; a fault has its epoch, since one that comes late would be taken for one of the next."""
    frame = getattr(message, message.WhichOneof("event") or "", None)
    if said.HasField("fault") and isinstance(frame, wire.Prompt | wire.Draft | wire.Credit | wire.Cancel):
        said.fault.epoch = frame.epoch
    return said


def prompt_problem(prompt: wire.Prompt, limits: Limits, vocab_size: int) -> wire.ServerMessage | None:
    """A Prompt that cannot be answered wherever the conversation is."""
    end = prompt.base_len + len(prompt.tokens)
    if end >= limits.max_context:
        return fault(
            wire.FAULT_CODE_CONTEXT_FULL,
            f"the conversation would have {end} tokens, "
            f"the target's context holds {limits.max_context}; shorten it or begin a new chat",
        )
    if not prompt.tokens:
        return fault(wire.FAULT_CODE_PROTOCOL, "a Prompt without tokens")
    problem = impossible(sampling_of(prompt.sampling))
    if problem:
        return fault(wire.FAULT_CODE_PROTOCOL, problem)
    wish = unknown(prompt.sampling)
    if wish:
        return fault(wire.FAULT_CODE_PROTOCOL, f"this verifier has no {wish}, as its Welcome says")
    return bad_tokens(prompt.tokens, vocab_size)  # last: there may be a million


def draft_problem(draft: wire.Draft, limits: Limits, vocab_size: int) -> wire.ServerMessage | None:
    """A Draft that cannot be verified wherever the conversation is."""
    if len(draft.tokens) > limits.max_draft_tokens:
        text = f"a draft of {len(draft.tokens)} tokens; this verifier takes {limits.max_draft_tokens}"
        return fault(wire.FAULT_CODE_TOO_LARGE, text)
    problem = bad_tokens(draft.tokens, vocab_size)
    if problem is not None:
        return problem
    try:
        parents = check_parents(draft.parents, len(draft.tokens))
    except TreeError as error:
        return fault(wire.FAULT_CODE_PROTOCOL, str(error))
    if not limits.trees and parents != chain(len(parents)):
        return fault(wire.FAULT_CODE_PROTOCOL, "a draft tree; this verifier takes chains only, as its Welcome says")
    return None


def bad_tokens(tokens: Sequence[int], vocab_size: int) -> wire.ServerMessage | None:
    """A token that the target does not know."""
    worst = max(tokens, default=0)
    if worst < vocab_size:
        return None
    return fault(wire.FAULT_CODE_PROTOCOL, f"token {worst} is outside the vocabulary of {vocab_size}")
