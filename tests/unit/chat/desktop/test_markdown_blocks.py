"""Markdown in blocks, and where the rendered text stands in the source."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_chat.desktop.markdown import GrowingMarkdown, Run, SpanIndex, align, parse
from moa_runtime.events import Origin, TextSpan

WRITTEN = ("word ", "**bold** ", "`code`", "[link](https://example.org) ", "ü🎨", "<b>", "&amp;")
STRUCTURE = ("\n", "\n\n", "- item", "1. one", "# ", "```py\n", "```", "    ", "> ", "| a | b |\n", "|---|---|\n")
PIECES = st.lists(st.sampled_from([*WRITTEN, *STRUCTURE, "---", "===", "\t", "\r\n"]), max_size=25)


@settings(max_examples=300)
@given(PIECES, PIECES, st.data())
def test_a_growing_text_has_the_blocks_of_the_whole_text(pieces, others, data):
    """Also a text that is cut back and continued differently."""
    growing, text = GrowingMarkdown(), ""
    for piece in pieces:
        text += piece
        growing.update(text)
    text = text[: data.draw(st.integers(0, len(text)))] + "".join(others)
    before = list(growing.blocks)
    first = growing.update(text)
    assert growing.blocks == parse(text) and growing.blocks[:first] == before[:first]


def test_a_block_has_its_lines_its_html_or_its_code():
    source = "# Title\n\nSome *text*.\n\n```Python extra\nx = 1\n```\n- a\n- b\n"
    blocks = parse(source)
    cut = [source[block.start : block.end].strip() for block in blocks]
    assert cut == ["# Title", "Some *text*.", "```Python extra\nx = 1\n```", "- a\n- b"]
    assert (blocks[2].code, blocks[2].language) == ("x = 1\n", "Python")
    assert blocks[1].html == "<p>Some <em>text</em>.</p>" and blocks[0].code is None


def test_no_html_gets_through_and_no_image_is_loaded():
    source = '<script>x</script>\n\n![pixel](https://example.org/p.png) <b onclick="">'
    html = "".join(block.html for block in parse(source))
    assert "<script" not in html and "<img" not in html and "<b " not in html


@pytest.mark.parametrize(
    ("rendered", "source", "expected"),
    [
        ("a b", "**a** b", [2, 5, 6]),
        ("see text a", "see [text](https://example.org/text-more) a", [0, 1, 2, 3, 5, 6, 7, 8, 41, 42]),
        ("one\ntwo", "- one\n- two", [2, 3, 4, 5, 8, 9, 10]),
        ("a < b an", "a &lt; b an", [0, 1, 2, 6, 7, 8, 9, 10]),  # an entity does not lead the rest astray
        ("x", "\\x", [1]),
    ],
)
def test_a_rendered_character_has_its_offset_in_the_source(rendered, source, expected):
    assert align(rendered, source) == expected


@settings(max_examples=200)
@given(PIECES)
def test_offsets_stay_inside_and_never_decrease(pieces):
    source = "".join(pieces)
    offsets = align("".join(piece.strip("*`#[") for piece in pieces), source)
    assert offsets == sorted(offsets) and all(0 <= at < max(len(source), 1) for at in offsets)


def test_text_is_cut_where_its_origin_changes():
    spans = [TextSpan("so **bo", Origin.DRAFTED, True), TextSpan("ld*", Origin.CORRECTED, True)]
    spans += [TextSpan("* it is", Origin.OFFLINE, False)]
    rendered = "so bold it is"
    runs = SpanIndex(spans).runs(align(rendered, "so **bold** it is"))
    assert [(rendered[run.start : run.end], run.origin.value) for run in runs] == [
        ("so bo", "drafted"),
        ("ld", "corrected"),
        (" it is", "offline"),
    ]
    index = SpanIndex([TextSpan("", Origin.KEPT, True), TextSpan("ab", Origin.KEPT, True)])
    assert index.runs([0, 1, 2, 3]) == [Run(0, 2, Origin.KEPT, True)], "text after the spans has no origin"
