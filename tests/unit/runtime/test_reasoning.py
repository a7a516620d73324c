"""Reasoning is told from the answer however the text is cut, and templates that can switch it do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_runtime.chat_template import ChatTemplate
from moa_runtime.reasoning import (
    ControlState,
    ControlTokens,
    Reasoned,
    ReasoningSplitter,
    reasoning_end,
    split_reasoning,
)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "answer"),
    [
        ("<think>\nTwo and two.\n</think>\n\n4", False, "Two and two.", "4"),
        ("\n<think>a</think>b</think>", False, "a", "b</think>"),
        ("<think>\n\n</think>\n\n4", False, "", "4"),
        ("<think>cut off </thin", False, "cut off </thin", ""),
        ("Two.\n</think>\n4", True, "Two.", "4"),
        ("<think>Two.</think>4", True, "Two.", "4"),
        (" plain <think> text", False, "", " plain <think> text"),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning_is_split_from_the_answer(text, begun, reasoning, answer) -> None:
    assert split_reasoning(text, begun=begun) == (reasoning, answer)
    end = reasoning_end(text, begun=begun)
    assert text[end:].lstrip() == answer.lstrip() and bool(end) == (begun or text.lstrip().startswith("<think>"))


PIECES = st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", " ", "\n", "a"])


@given(st.lists(PIECES, max_size=9), st.booleans())
def test_pieces_add_up_to_the_whole(pieces: list[str], begun: bool) -> None:
    splitter, found = ReasoningSplitter(begun=begun), Reasoned("", "")
    for piece in [*pieces, ""]:
        new = splitter.feed(piece)
        found = Reasoned(found.reasoning + new.reasoning, found.answer + new.answer)
    rest = splitter.feed("", final=True)
    found = Reasoned(found.reasoning + rest.reasoning, found.answer + rest.answer)
    assert found == split_reasoning("".join(pieces), begun=begun)


SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
SPECIAL += ["<|channel>", "<channel|>", "[THINK]", "[/THINK]", "</think>"]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (
            "<|channel|> analysis <|message|> Two. <|end|> <|start|> assistant <|channel|> analysis <|message|> Four. "
            "<|end|> <|start|> assistant <|channel|> final <|message|> 4 <|return|>",
            "<think>Two.\n\nFour.</think>4",
        ),
        ("<|channel|> final <|message|> 4 <|end|> <|channel|> analysis <|message|> b", "4\n\nb"),
        ("<|channel|> commentary <|message|> a <|end|> <|channel|> final <|message|> 4", "a\n\n4"),
        ("<|channel> thought \n Two. <channel|> 4", "<think>Two.</think>4"),
        ("[THINK] Two. [/THINK] 4", "<think>Two.</think>4"),
        ("Two. </think> 4", "Two.</think>4"),
        ("4 <|channel|> 4", "4"),
    ],
)
def test_control_tokens_are_marks_of_reasoning(texts, shown) -> None:
    tokens = texts.split(" ")
    ids = {text: number for number, text in enumerate([*SPECIAL, *set(tokens) - set(SPECIAL)])}
    control = ControlTokens({text: ids[text] for text in SPECIAL}, {ids[text]: text for text in ids}.__getitem__)
    state, pieces = ControlState(), ""
    for text in tokens:
        state, piece = control.step(state, ids[text])
        pieces += ("" if text == "<|return|>" else text) if piece is None else piece
    assert pieces == shown


def test_a_template_that_can_switch_reasoning_does() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}short{% else %}long{% endif %}"
    template = ChatTemplate(source, {})
    assert template.knows_thinking and not ChatTemplate("{{ messages }}", {}).knows_thinking
    rendered = [template.render([], True, thinking=thinking) for thinking in (None, True, False)]
    assert rendered == ["long", "long", "short"]
