"""Traces in which a client session receives every frame and every allowed call in each of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moa_runtime.session.client import ClientSession
from moa_runtime.session.client_table import State
from moa_runtime.session.events import Origin, Policy, Sampling
from moa_runtime.session.memory_rows import encode_rows
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from vectors.trace_scripts import answered, asked, drafted, refused, tell, verdict, welcome


def _down() -> ClientSession:
    client = answered()
    client.cancel()
    client.disconnected()
    return client


def _offline_answering() -> ClientSession:
    client = answered()
    client.disconnected()
    return client


def _handshake() -> ClientSession:
    client = _down()
    client.connect()
    client.frames_to_send()
    return client


def _resuming() -> ClientSession:
    client = _offline_answering()
    client.connect()
    client.frames_to_send()
    return client


def _idle() -> ClientSession:
    client = answered()
    client.cancel()
    client.frames_to_send()
    return client


def _needs_prompt() -> ClientSession:
    client = _resuming()
    client.held = True
    tell(client, welcome=welcome(committed_length=3, epoch=1))
    return client


def _streaming() -> ClientSession:
    client = answered()
    client.grant_credit(20)
    client.frames_to_send()
    return client


def _revoking() -> ClientSession:
    client = _streaming()
    client.revoke_credit()
    client.frames_to_send()
    return client


MAKERS: Mapping[State, Callable[[], ClientSession]] = {
    State.DOWN: _down,
    State.OFFLINE_ANSWERING: _offline_answering,
    State.HANDSHAKE: _handshake,
    State.RESUMING: _resuming,
    State.IDLE: _idle,
    State.NEEDS_PROMPT: _needs_prompt,
    State.DRAFTING: answered,
    State.PROMPTED: asked,
    State.PROPOSED: drafted,
    State.STREAMING: _streaming,
    State.REVOKING: _revoking,
}
_NUMBERS = np.ones((2, 1, 2), np.float32)


def every_frame_in_every_state() -> None:
    for make in MAKERS.values():
        client = make()
        epoch = client.snapshot()["epoch"]
        tell(client, verdict=verdict(4, [2], epoch=epoch + 1, echo=wire.Echo(stamp=1, held_us=5)))
        tell(client, standing=wire.CreditRevoked(epoch=epoch + 1, serial=1))
        tell(client, standing=wire.CreditRevoked(epoch=epoch, serial=99))
        rows = encode_rows(0, _NUMBERS, _NUMBERS, wire.ROW_ENCODING_INT8)
        rows.epoch = epoch
        tell(client, rows=rows)
        tell(client, pong=wire.Pong(echo=wire.Echo(stamp=client.stamp, held_us=7)))
        tell(client, fault=wire.Fault(code="FAULT_CODE_INTERNAL", text="again", retry_after_ms=100))
        tell(client, fault=wire.Fault(code="FAULT_CODE_OUT_OF_SYNC", text="less", committed_length=2))
        tell(make(), verdict=verdict(4, [2], epoch=epoch))
        tell(make(), welcome=welcome(committed_length=4, epoch=epoch))


def every_call_in_every_state() -> None:
    """All calls that change the state, but for those of the other scripts and of the tests of single steps."""
    for make in MAKERS.values():
        for call in (
            ClientSession.disconnected,
            ClientSession.resend,
            ClientSession.cancel,
            lambda client: client.answering and client.extend([2], Origin.DRAFTED),
            lambda client: refused(client.keep, 3, [4]),
            lambda client: client.answering or client.continue_answer([], 3, Sampling()),
        ):
            client = make()
            call(client)
            client.frames_to_send()
    client = _idle()
    client.held = True
    client.continue_answer([], 3, Sampling())
    client.resume()
    client.held = False
    client.resume()
    client.frames_to_send()


def credit_granted_and_revoked_before_the_verdict() -> None:
    """A Prompt or Draft awaits its verdict, which the engine fails to give; CreditRevoked comes first."""
    for make in (asked, drafted):
        client = make()
        client.grant_credit(20)
        client.revoke_credit()
        client.frames_to_send()
        tell(client, fault=wire.Fault(code="FAULT_CODE_INTERNAL", text="again", retry_after_ms=100))
        tell(client, standing=wire.CreditRevoked(epoch=1, serial=2))
        client.resend()
        client.frames_to_send()
        tell(client, verdict=verdict(3 if make is asked else 4, [8, 2], accepted=1))


def the_link_is_cut_within_a_credit() -> None:
    """The Hello carries the credit, and the server continues."""
    client = _streaming()
    client.disconnected()
    client.connect()
    client.frames_to_send()
    tell(client, welcome=welcome(committed_length=4, epoch=1))
    tell(client, verdict=verdict(4, [2, 3], pushed=True))


def the_answer_ends_while_the_credit_is_revoked() -> None:
    client = _revoking()
    tell(client, verdict=verdict(4, [2, 0], pushed=True, finish=wire.FINISH_STOP))
    tell(client, standing=wire.CreditRevoked(epoch=1, serial=2))


def kept_in_place_of_a_late_verdict() -> None:
    """In every state in which one is taken; and while nothing is to be asked for."""
    for held in (False, True):
        for make, base_len in ((asked, 3), (drafted, 4), (_streaming, 4), (_revoking, 4)):
            client = make()
            client.policy, client.held = Policy.KEEP, held
            client.extend([5, 6], Origin.OFFLINE)
            client.declare_offline(0)
            tell(client, verdict=verdict(base_len, [7]))


def kept_in_place_of_a_second_verdict() -> None:
    """The verdict is on a frame that was sent twice."""
    for held in (False, True):
        client = drafted()
        client.resend()
        client.frames_to_send()
        tell(client, verdict=verdict(4, [2, 3, 4], accepted=2))
        client.policy, client.held = Policy.KEEP, held
        client.extend([5, 6], Origin.OFFLINE)
        tell(client, verdict=verdict(4, [2, 3, 4, 7], accepted=2))


def out_of_sync_while_held() -> None:
    """The server gets the tokens that it lacks after requests are no longer held."""
    for state in (State.PROMPTED, State.PROPOSED, State.STREAMING, State.REVOKING):
        client = MAKERS[state]()
        if state is State.PROMPTED:
            tell(client, fault=wire.Fault(code="FAULT_CODE_OUT_OF_SYNC", text="less", committed_length=0))
            tell(client, verdict=verdict(3, [8], epoch=2))
            client.cancel()
            client.continue_answer([], 3, Sampling())  # a Prompt that is no question
            client.frames_to_send()
        client.held = True
        tell(client, fault=wire.Fault(code="FAULT_CODE_OUT_OF_SYNC", text="less", committed_length=1))
        client.resume()
        client.held = False
        client.resume()
        client.frames_to_send()


STATE_SCRIPTS: tuple[Callable[[], None], ...] = (
    every_frame_in_every_state,
    every_call_in_every_state,
    credit_granted_and_revoked_before_the_verdict,
    the_link_is_cut_within_a_credit,
    the_answer_ends_while_the_credit_is_revoked,
    kept_in_place_of_a_late_verdict,
    kept_in_place_of_a_second_verdict,
    out_of_sync_while_held,
)
