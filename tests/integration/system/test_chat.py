"""The runtime against a real verifier: whatever happens to the link, the text is the target's own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import background_link
from moa_runtime.bundle import Bundle
from moa_runtime.chat import ChatError
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, LinkChanged, LinkStatus, Origin
from moa_runtime.session.events import FinishReason, Policy, Sampling
from moa_runtime.sync import SyncChat
from moa_runtime.transport import ConnectError, Endpoint
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import QUESTION, ask, chatting, endpoint, own_decoding


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 0.95, seed=7)])
def test_two_turns_equal_the_servers_own_decoding(verifier: Verifier, bundle: Bundle, sampling: Sampling) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            for turn, text in enumerate((QUESTION, "And why?")):
                answer = await ask(chat, text, sampling=sampling)
                ids = [token.token for token in answer.tokens]
                assert ids == own_decoding(verifier, chat, answer, 24, sampling)
                assert all(token.committed for token in answer.tokens)
                assert len(chat.messages) == 2 * (turn + 1)
                figures = answer.statistics
                assert figures.tokens == len(ids) and figures.rounds >= 1 and figures.bytes_down > figures.bytes_up > 0

    asyncio.run(run())


def test_the_conversation_follows_the_chat_template(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), system="Be brief.") as chat:
            await ask(chat, count=200)
            await ask(chat, "And why?", count=8)
            rendered = chat.tokenizer.decode(chat.tokens, skip_special_tokens=False)
            expected = chat.tokenizer.render_chat(
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
            )
            assert rendered.startswith(expected)
            assert "<|im_end|>\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n" in rendered

    asyncio.run(run())


def test_a_cut_link_is_written_through_and_reconciled(verifier: Verifier, bundle: Bundle) -> None:
    """A dead zone longer than the client's patience: it reconnects, and rolls back to the target's text."""
    seen: dict[str, object] = {"offline": 0, "statuses": []}

    async def run() -> None:
        with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
            async with chatting(bundle, endpoint(verifier, link.port)) as chat:

                def watch(event: ChatEvent) -> None:
                    if isinstance(event, LinkChanged):
                        seen["statuses"].append(event.status)  # type: ignore[union-attr]
                    if not isinstance(event, AnswerUpdate):
                        return
                    if "cut" not in seen and sum(t.committed for t in event.tokens) >= 4:
                        seen["cut"] = True
                        link.cut()
                    offline = sum(t.origin is Origin.OFFLINE for t in event.tokens if not t.committed)
                    seen["offline"] = max(offline, int(str(seen["offline"])))
                    if offline >= 12 and "restoring" not in seen:
                        seen["restoring"] = True
                        asyncio.get_running_loop().call_later(2.0, link.restore)

                answer = await ask(chat, count=60, watch=watch)
                ids = [token.token for token in answer.tokens]
                assert ids == own_decoding(verifier, chat, answer, 60, Sampling())

    asyncio.run(run())
    assert int(str(seen["offline"])) >= 12
    statuses = seen["statuses"]
    assert LinkStatus.OFFLINE in statuses and statuses[-1] is LinkStatus.ONLINE  # type: ignore[operator,index]


def test_keep_leaves_what_the_device_wrote(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), policy=Policy.KEEP) as chat:
            written: list[int] = []
            gone = asyncio.Event()

            def watch(event: ChatEvent) -> None:
                if not isinstance(event, AnswerUpdate):
                    return
                if sum(t.committed for t in event.tokens) >= 3:
                    gone.set()
                waiting = [t for t in event.tokens if not t.committed]
                if any(t.origin is Origin.OFFLINE for t in waiting):
                    written[:] = [t.token for t in waiting]

            question = asyncio.create_task(ask(chat, count=80, watch=watch))
            await gone.wait()
            await chat.work_offline(True)
            while len(written) < 8:
                await asyncio.sleep(0.01)
            before = list(written)
            await chat.work_offline(False)
            answer = await question
            kept = [t.token for t in answer.tokens if t.origin is Origin.KEPT]
            assert len(kept) >= 8 and kept[: len(before)] == before
            assert answer.statistics.kept == len(kept)

    asyncio.run(run())


def test_a_stopped_answer_leaves_the_chat_usable(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            answer = chat.send(QUESTION, max_new_tokens=100)
            async for event in answer:
                if isinstance(event, AnswerUpdate) and sum(t.committed for t in event.tokens) >= 3:
                    break
            await answer.aclose()
            after = await ask(chat, "And why?")
            assert [t.token for t in after.tokens] == own_decoding(verifier, chat, after, 24, Sampling())
            assert [m["role"] for m in chat.messages] == ["user", "assistant", "user", "assistant"]

    asyncio.run(run())


def test_a_prompt_longer_than_the_context_is_refused_and_the_chat_goes_on(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            with pytest.raises(ChatError, match="context holds 512"):
                await ask(chat, "word " * 600)
            assert (await ask(chat)).reason in (FinishReason.LENGTH, FinishReason.STOP)

    asyncio.run(run())


def test_connecting_says_what_is_wrong(verifier: Verifier, bundle: Bundle, engine, unused_port: int) -> None:
    from dataclasses import replace

    async def refusal(where: Endpoint, code: str, what: Bundle = bundle) -> str:
        with refused(code) as caught:
            async with chatting(what, where):
                pass
        return str(caught.value)

    asyncio.run(refusal(Endpoint(f"ws://127.0.0.1:{verifier.port}", "wrong"), "unauthorized"))
    asyncio.run(refusal(Endpoint(f"ws://127.0.0.1:{unused_port}"), "unreachable"))
    asyncio.run(refusal(Endpoint("ftp://nowhere"), "bad_address"))
    other = replace(
        bundle, manifest=replace(bundle.manifest, fingerprints=replace(bundle.manifest.fingerprints, target="f" * 32))
    )
    text = asyncio.run(refusal(endpoint(verifier), "fingerprint_mismatch", other))
    assert "f" * 32 in text and engine.fingerprints.target in text


def test_the_blocking_wrapper(verifier: Verifier, bundle: Bundle) -> None:
    with SyncChat(bundle, endpoint(verifier), threads=1) as chat:
        events = list(chat.send(QUESTION, max_new_tokens=12))
        assert isinstance(events[-1], AnswerFinished) and len(events[-1].tokens) <= 12
        for _ in chat.send("And why?", max_new_tokens=50):
            break  # leaving early stops the answer
        assert isinstance(list(chat.send("Go on.", max_new_tokens=5))[-1], AnswerFinished)
    with pytest.raises(ConnectError):
        SyncChat(bundle, Endpoint("ftp://nowhere"))


@pytest.mark.parametrize(("answer", "final"), [(b"", False), (b"HTTP/1.1 101", False), (b"220 mail\r\n\r\n", True)])
def test_a_verifier_that_dies_while_it_is_greeted_is_asked_again(bundle: Bundle, answer: bytes, final: bool) -> None:
    async def run() -> None:
        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(die, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ConnectError) as caught:
                async with chatting(bundle, Endpoint(f"ws://127.0.0.1:{port}")):
                    pass
        assert caught.value.final is final, caught.value

    asyncio.run(run())


def test_an_answer_under_way_goes_on_without_asyncio(verifier: Verifier, bundle: Bundle, tmp_path: Path) -> None:
    where, options = endpoint(verifier), {"threads": 1, "store": tmp_path / "chat.json"}
    with SyncChat(bundle, where, **options) as chat:
        assert chat.pending() is None and chat.question == ""
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
        answer = [*pending][-1]
        assert isinstance(answer, AnswerFinished)
        assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
        assert [token.token for token in answer.tokens] == own_decoding(verifier, chat.chat, answer, 120, Sampling())
