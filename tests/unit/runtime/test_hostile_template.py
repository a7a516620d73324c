"""Any chat template renders, or is refused by a sentence, within its budget."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_runtime.chat_template import _FILTERS, _METHODS, ChatTemplate, ChatTemplateError

VALUES = (
    "messages messages[0].content 'a' '%s%9d' '{}{}' -1 2**20 1.5 none true n n.x m loop range(9999) [1,2] () {'a':1} "
    "x namespace(x=1) 'a'*9999 range(99)|list cycler('a','b') joiner(',') dict(a=1)"
)
OPERATORS = "+ - * / // % ** ~ == < in and or"
NAMES = [*sorted(_METHODS), "format", "append", "__class__", "x"]


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators, filters, names = map(st.sampled_from, (OPERATORS.split(), sorted(_FILTERS), NAMES))
    return st.one_of(
        st.builds("({} {} {})".format, inner, operators, inner),
        st.builds("({}|{}({}))".format, inner, filters, inner | st.just("")),
        st.builds("{}.{}({})".format, inner, names, inner | st.just("")),
        st.builds("{}[{}]".format, inner, inner | st.sampled_from([":", "::-1"])),
        st.builds("[{},{}]".format, inner, inner),
        st.builds("({} if {} is eq {} else {})".format, inner, inner, inner, inner),
    )


EXPRESSIONS = st.recursive(st.sampled_from(VALUES.split()), larger, max_leaves=12)
STATEMENTS = st.recursive(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    lambda inner: st.one_of(
        st.builds("{{% for m in {} recursive %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% set n.x = {} %}}{}{}".format, EXPRESSIONS, inner, inner),
        st.builds("{{% macro f(x) %}}{}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, EXPRESSIONS),
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(STATEMENTS)
def test_a_template_renders_or_is_refused(statements: str) -> None:
    with contextlib.suppress(ChatTemplateError):
        template = ChatTemplate("{% set n = namespace(x='a') %}" + statements, {})
        assert len(template.render([{"role": "user", "content": "Hi"}], True)) < 1 << 21


def test_a_template_of_many_cheap_steps_is_refused() -> None:
    """Found by fuzzing: it looped over each character in a loop over each character, which took more than a second."""
    loops = "{% for m in messages ~ last %}{% for m in messages ~ recursive %}{{ -1 }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 900}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(loops, {}).render(messages, True)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}] * 5000
    one = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] | trim }}{% endfor %}"
    assert ChatTemplate(one, {}).render(turns, True).count("<|") == 10_000


@pytest.mark.parametrize(
    "text",
    ["15|round(-99999999)", "15|round(precision=99999999)", "'%*d' % (-99999999, 1)", "'%.*f'|format(-99999999, 1.5)"],
)
def test_a_large_negative_number_is_refused_as_a_positive_one_is(text: str) -> None:
    """Python computes 10 to the power of a precision, for minutes, and pads to the left, too."""
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ " + text + " }}", {}).render([], True)


def test_numbers_are_rounded() -> None:
    text = "{{ 15.26|round(1) }} {{ 15|round(-1, 'floor') }} {{ 2.5|round(method='ceil')|int }} {{ '%-4d|' % 7 }}"
    assert ChatTemplate(text, {}).render([], True) == "15.3 10.0 3 7   |"


def test_a_template_of_too_many_branches_is_refused_with_a_reason() -> None:
    with pytest.raises(ChatTemplateError) as refused:
        ChatTemplate("{% if 0 %}" + "{% elif 0 %}" * 8000 + "{% endif %}", {})
    assert not str(refused.value).rstrip().endswith(":")
