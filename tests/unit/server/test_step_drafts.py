"""Text, verdicts and calibration with unsolicited drafts, whatever of them is verified."""

from __future__ import annotations

import random

import pytest

from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import new_sequence
from moa_server.scheduling.step_drafts import Calibrations, StepDrafts
from support.server.stepping import step
from support.toy_engine import VOCAB, ToyEngine, plain

PROMPT, MOST = [3, 1, 4], 120


def drafted(engine: ToyEngine, rng: random.Random, base: list[int], stamp: int) -> wire.Draft:
    """Make a draft whose tokens are right four times out of five, and claimed to be certain."""
    tokens: list[int] = []
    for _ in range(rng.randint(0, 8)):
        right = engine.choice([*base, *tokens])
        tokens.append(right if rng.random() < 0.8 else rng.randrange(1, VOCAB))
    return wire.Draft(
        epoch=1, base_len=len(base), tokens=tokens, stamp=stamp, unsolicited=True, confidences=bytes(len(tokens))
    )


@pytest.mark.parametrize("seed", range(20))
def test_late_and_cut_drafts_change_no_text(seed: int) -> None:
    engine, rng, calibrations = ToyEngine(), random.Random(seed), Calibrations()
    session = ServerSession(Limits(1000, 64, 1 << 20, 60, True, 0, 0), VOCAB, engine.stop_tokens)
    session.greet(wire.Hello(), "token")
    sequence, stamps, used = new_sequence(), set[int](), 0
    prompt = wire.Prompt(epoch=1, tokens=PROMPT, max_length=len(PROMPT) + MOST)
    work = session.receive(wire.ClientMessage(prompt=prompt))
    while isinstance(work, Verify):
        drafts = StepDrafts(session, sequence, calibrations, work)
        job = drafts.job(None)
        job.take_newest()
        least = rng.random()
        nodes = [index for index, path in enumerate(job.paths) if path >= least]
        request = job.request(engine.held(sequence, job.prefix), 100, nodes)
        base = max(len(PROMPT), len(session.committed) - rng.randint(0, 3))
        late = drafted(engine, rng, session.committed[:base], len(stamps) + 1)
        if rng.random() < 0.7:  # during the step
            session.keep_draft(late)
            stamps.add(late.stamp)
        job.take(request, step(engine, request))
        message, verified = drafts.verdict(job)
        verdict = message.verdict
        assert verified == verdict.drafted == len(nodes) and verdict.accepted <= verified
        assert verdict.draft_stamp in (stamps if nodes else {0, *stamps})
        used += verdict.accepted
        session.receive(wire.ClientMessage(credit=wire.Credit(epoch=1, position=1000)))
        work = session.next_work(rows=False)
    assert session.committed == [*PROMPT, *plain(engine, PROMPT, MOST)] and used > 0
    assert 0.6 < calibrations.device.paths([0], [1.0])[0] < 0.93
