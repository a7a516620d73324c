"""Text of an answer that changes while it is shown, and turns of a chat as tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moa_runtime.answer_view import AnswerRecord, AnswerText, shared_word
from moa_runtime.conversation import Conversation, Question
from moa_runtime.events import FinishReason, Origin, TextSpan, TokenOrigin
from moa_runtime.session.events import Committed
from moa_runtime.tokenizer import ChatTokenizer
from support import tiny

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
DRAFTED, OFFLINE, CORRECTED = Origin.DRAFTED, Origin.OFFLINE, Origin.CORRECTED
# As Qwen3's does with reasoning: an earlier answer loses what stands before "=>".
FORGETFUL = tiny.CHAT_TEMPLATE.replace(
    "message['content']", "(message['content'] if loop.last else message['content'].split('=>')[-1])"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_target / "tokenizer.json", tiny.CHAT_TEMPLATE, SPECIAL, [2])


def marked(tokens: list[int], origin: Origin, committed: bool) -> list[TokenOrigin]:
    return [TokenOrigin(token, origin, committed) for token in tokens]


def test_only_what_changed_is_replaced(tokenizer: ChatTokenizer) -> None:
    text = AnswerText(tokenizer)
    paris, nice, big = (tokenizer.encode(word) for word in ("Paris is", " nice", " big"))
    assert text.show(marked(paris, DRAFTED, True) + marked(nice, OFFLINE, False)) == ""
    assert text.spans() == (TextSpan("Paris is", DRAFTED, True), TextSpan(" nice", OFFLINE, False))
    assert text.show(marked(paris, DRAFTED, True) + marked(big, CORRECTED, True)) == " nice"
    assert text.spans() == (TextSpan("Paris is", DRAFTED, True), TextSpan(" big", CORRECTED, True))
    assert "".join(text.pieces()[: len(paris)]) == "Paris is"


def test_a_character_belongs_to_its_last_token(tokenizer: ChatTokenizer) -> None:
    text = AnswerText(tokenizer)
    fox = tokenizer.encode("🦊")
    assert len(fox) == 4
    text.show(marked(fox[:3], DRAFTED, True))
    assert text.spans() == ()
    assert text.spans(complete=True) == (TextSpan("\N{REPLACEMENT CHARACTER}", DRAFTED, True),)
    text.show(marked(fox[:3], DRAFTED, True) + marked(fox[3:], OFFLINE, False))
    assert text.spans() == text.spans(complete=True) == (TextSpan("🦊", OFFLINE, False),)


@pytest.mark.parametrize("reason", FinishReason)
def test_only_a_cut_answer_leaves_half_a_character_out(tokenizer: ChatTokenizer, reason: FinishReason) -> None:
    record = AnswerRecord(tokenizer, Question([], 0, []), lambda: (0, 0))
    tokens = (*tokenizer.encode("A"), *tokenizer.encode("🦊")[:3])
    record.hear(Committed(0, tokens, (DRAFTED,) * len(tokens)))
    finished = record.finish(reason)
    expected = "A\N{REPLACEMENT CHARACTER}" if reason is FinishReason.STOP else "A"
    assert finished.text == "".join(finished.pieces) == "".join(span.text for span in finished.spans) == expected


def test_whatever_came_before_the_text_is_that_of_the_tokens(tokenizer: ChatTokenizer) -> None:
    chance = random.Random(5)
    texts = ["naïve 日本語", " 🦊🦊 été", "a\n\n  b\t", "<|im_end|> x"]
    answer, shown = AnswerText(tokenizer), ""
    tokens: list[TokenOrigin] = []
    for _ in range(300):
        settled = chance.randrange(len(tokens) + 1)
        kind = chance.choice([DRAFTED, CORRECTED]), chance.random() < 0.5
        tokens[settled:] = marked(tokenizer.encode(chance.choice(texts)), *kind)
        dropped = answer.show(tokens, settled)
        assert shown.endswith(dropped)
        shown = "".join(answer.pieces())
        anew = AnswerText(tokenizer)
        anew.show(tokens)
        if chance.random() < 0.7:
            assert answer.spans() == anew.spans()
        complete = answer.spans(complete=True)
        assert complete == anew.spans(complete=True)
        assert "".join(span.text for span in complete) == tokenizer.decode([token.token for token in tokens])


def asked(conversation: Conversation, committed: list[int], text: str) -> list[int]:
    """All tokens up to the answer."""
    question = conversation.ask(committed, text)
    assert question.length == question.kept + len(question.supplied)
    return committed[: question.kept] + question.supplied


def test_an_answer_keeps_its_own_tokens(tokenizer: ChatTokenizer) -> None:
    """The target wrote "red" letter by letter, which is not how the tokenizer would."""
    conversation = Conversation(tokenizer)
    letters = [token for letter in "red" for token in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("red")
    committed = asked(conversation, [], "A colour?") + letters + [2]
    conversation.answered(conversation.ask([], "A colour?"), "red", len(committed))
    assert asked(conversation, committed, "Why?")[: len(committed)] == committed
    conversation.restore(conversation.messages)
    assert conversation.length == len(committed)
    conversation.restore([*conversation.messages[:-1], {"role": "assistant", "content": "blue"}])
    assert conversation.length == 0
    edited = [*conversation.messages, {"role": "user", "content": "Why?"}]
    assert asked(conversation, committed, "Why?") == tokenizer.encode_chat(edited)


def test_a_template_may_rewrite_history(tiny_target: Path) -> None:
    tokenizer = ChatTokenizer(tiny_target / "tokenizer.json", FORGETFUL, SPECIAL, [2])
    conversation = Conversation(tokenizer)
    question = conversation.ask([], "Hi")
    committed = question.supplied + tokenizer.encode("hmm=>Hello.") + [2]
    conversation.answered(question, "hmm=>Hello.", len(committed))
    messages = [*conversation.messages, {"role": "user", "content": "Why?"}]
    again = conversation.ask(committed, "Why?")
    assert committed[: again.kept] + again.supplied == tokenizer.encode_chat(messages)
    assert again.kept == question.length
    # The old answer's tokens are gone, so its end is not remembered either.
    conversation.answered(again, "So.", again.length + 2)
    conversation.restore(conversation.messages[:2])
    assert conversation.length == 0


@pytest.mark.parametrize(
    ("before", "versions", "word"),
    [
        ("in every col", ("ours", "umn"), "col"),
        ("in every column", (" of it", ", too"), "column"),
        ("in every column", (" of it", " and row"), ""),
        ("in every ", ("column", "row"), ""),
        ("", ("It", ""), ""),
    ],
)
def test_versions_share_a_word_that_one_of_them_completes(before: str, versions: tuple[str, str], word: str) -> None:
    assert shared_word(before, *versions) == word
