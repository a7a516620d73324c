"""The runtime against a real verifier: the text is the target's own, also for programs without asyncio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moa_bench.serving import OracleDrafter
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import GREEDY, Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.events import AnswerFinished, AnswerUpdate
from moa_runtime.options import Conditions
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from moa_runtime.sync import SyncChat
from moa_runtime.transport import Endpoint
from moa_server.scheduling.draft_choice import DraftGain
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import IMPATIENT, QUESTION, QUICK, ask, chatting, endpoint, ids, own_decoding


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 0.95, seed=7)])
async def test_two_turns_equal_the_servers_own_decoding(chat: Chat, verifier: Verifier, sampling: Sampling) -> None:
    for turn, text in enumerate((QUESTION, "And why?")):
        answer = await ask(chat, text, sampling=sampling)
        assert ids(answer) == own_decoding(verifier, chat, answer, 24, sampling)
        assert all(token.committed for token in answer.tokens)
        assert len(chat.messages) == 2 * (turn + 1)
        figures = answer.statistics
        assert figures.tokens == len(answer.tokens) and figures.rounds >= 1
        assert figures.bytes_down > figures.bytes_up > 0


async def test_a_verifier_of_another_target_is_refused(verifier: Verifier, bundle: Bundle, engine) -> None:
    prints = replace(bundle.manifest.fingerprints, target="f" * 32)
    with refused("fingerprint_mismatch") as caught:
        async with chatting(
            replace(bundle, manifest=replace(bundle.manifest, fingerprints=prints)), endpoint(verifier)
        ):
            pass
    assert "f" * 32 in str(caught.value) and engine.fingerprints.target in str(caught.value)


class Prophet(OracleDrafter):
    """Knows the answer to one prompt, and four tokens of it more than it is asked for."""

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        right = super().propose(prefix, replace(budget, levels=budget.levels + 4)).tokens
        return DraftTree.chain(right, [math.log(0.8)] * len(right), [1] * min(len(right), budget.levels))


async def test_what_is_known_without_a_step_goes_with_the_draft(
    verifier: Verifier, bundle: Bundle, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three drafted tokens and four more; the last draft is as long as the answer may still be."""
    # All that is sent pays, however long steps take here.
    monkeypatch.setattr(verifier.parts.worker.cost, "curve", lambda tokens, *_: np.ones(np.shape(tokens)))
    monkeypatch.setattr(DraftGain, "least", lambda *_, **__: 0.0)
    answer = await ask(chat)
    own, rounds = own_decoding(verifier, chat, answer, 24, Sampling()), list[RoundEnded]()
    drafter = Prophet(chat.prompt_tokens, own)
    shape = FixedShape(Budget.chain(3))
    async with Chat(bundle, endpoint(verifier), drafter=drafter, controller=shape, settings=QUICK) as drafted:
        await drafted.open()
        drafted._loop.listen(lambda event: rounds.append(event) if isinstance(event, RoundEnded) else None)
        answer = await ask(drafted)
    assert ids(answer) == own and len(own) == 24 and answer.statistics.drafted == 21
    # One token comes with the prompt's verdict, eight with each of the first rounds.
    rounds = [each for each in rounds if not each.supplied]
    assert [(each.drafted, each.accepted, each.steps) for each in rounds] == [(7, 7, (1, 1, 1))] * 3
    assert all(each.draft_s > 0 and each.waited_s >= each.compute_s > 0 for each in rounds)


def test_a_chat_without_asyncio(verifier: Verifier, bundle: Bundle, tmp_path: Path) -> None:
    where, options = endpoint(verifier), {"threads": 1, "store": tmp_path / "chat.json", "timing": IMPATIENT}
    with SyncChat(bundle, where, **options) as chat:
        assert chat.pending() is None and chat.question == ""
        *_, first = chat.send(QUESTION, max_new_tokens=12)
        assert isinstance(first, AnswerFinished) and len(first.tokens) <= 12
        for _ in chat.send("And why?", max_new_tokens=50):
            break  # leaving early stops the answer
        chat.restore([])
        assert chat.keep_mine() is None
        chat.tell_conditions(Conditions(low_power=True))
        chat.network_changed()
        *_, again = chat.send(QUESTION, max_new_tokens=12)
        assert isinstance(again, AnswerFinished) and again.text == first.text and chat.chat.conditions.low_power
        chat.restore([])
        seen = []
        for event in chat.send(QUESTION, max_new_tokens=120):
            seen.append(event)
            if isinstance(event, AnswerUpdate) and event.committed:
                chat.close()
        assert not isinstance(seen[-1], AnswerFinished)
    with SyncChat(bundle, where, **options) as chat:
        assert chat.question == QUESTION and chat.messages == []
        pending = chat.pending()
        assert pending is not None
        *_, answer = pending
        assert isinstance(answer, AnswerFinished)
        assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
        assert ids(answer) == own_decoding(verifier, chat.chat, answer, 120, Sampling())
    with refused("bad_address"):
        SyncChat(bundle, Endpoint("ftp://nowhere"))
    with refused("not_ascii"):
        SyncChat(bundle, Endpoint(where.url, f"{where.token}\n"), threads=1)
