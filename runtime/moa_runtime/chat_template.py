"""A target's chat template: downloaded code, so it runs in a sandbox with limits of time and size."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import FrameType
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moa_runtime.errors import MoaError

Message = Mapping[str, str]

#: A long conversation takes some milliseconds.
_LONGEST_S = 3.0
#: Characters of a repeated text or a width that a template asks for, and bits of its numbers.
_MOST_CHARACTERS, _MOST_BITS = 1 << 20, 1 << 12
#: A width or a precision of that size in the text of a format.
_WIDE = re.compile("[1-9][0-9]{6}")


class ChatTemplateError(MoaError):
    """A chat template cannot be read, or refuses a conversation."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it has no effect on its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """An environment with transformers' settings, so that a template renders to the same text, and with limits."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.filters |= {name: _bounded(each) for name, each in self.filters.items()}
        self.filters["format"] = _format
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check an operation before it runs, because it cannot be interrupted."""
        if operator == "%":
            if isinstance(left, str):
                _check_format(left, *(right if isinstance(right, tuple) else (right,)))
            return super().call_binop(context, operator, left, right)
        bits = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
        sizes = [len(value) if isinstance(value, Sequence) else 0 for value in (left, right)]
        if operator == "**":
            too_large = bits[0] * (right if isinstance(right, int) else 0) > _MOST_BITS
        else:
            counts = [value if isinstance(value, int) else 0 for value in (right, left)]
            repeated = max(size * count for size, count in zip(sizes, counts, strict=True))
            too_large = sum(bits) > _MOST_BITS or repeated > _MOST_CHARACTERS
        if too_large:
            raise JinjaError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Check a call before it runs: its arguments limit the size of its result."""
        _check_sizes(*arguments, *named.values())
        if getattr(function, "__name__", "") in ("format", "format_map"):
            _check_format(getattr(getattr(function, "__wrapped__", function), "__self__", ""))
        return super().call(context, function, *arguments, **named)


class ChatTemplate:
    """A chat template. Any thread may use it.

    Args:
        source: Jinja, as in transformers.
        special_tokens: names that the template may use, such as ``{"bos_token": "<s>"}``.

    Raises:
        ChatTemplateError: it cannot be read.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _Environment().from_string(source)
        except (JinjaError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot be read: {error}", code="unreadable") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Return the text of a conversation, ``{"role": ..., "content": ...}`` each, as the target was trained on it.

        Raises:
            ChatTemplateError: the template refuses these messages, fails, or does not end.
        """
        try:
            with _for_seconds(_LONGEST_S):
                return self._template.render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
        except ChatTemplateError:
            raise
        except Exception as error:  # foreign code may raise anything
            text = f"the chat template refuses this conversation: {str(error) or type(error).__name__}"
            raise ChatTemplateError(text, code="template_refuses") from error


@contextmanager
def _for_seconds(seconds: float) -> Iterator[None]:
    """Limit the time of Python code, templates included; raise ChatTemplateError from within it when the time is up."""
    ends = time.monotonic() + seconds

    def watch(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if time.monotonic() > ends:
            text = f"the chat template does not end within {seconds:g} s: export the bundle again with another one"
            raise ChatTemplateError(text, code="timeout")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses too large arguments."""

    @wraps(function)  # keeps jinja2's marks of the filter
    def call(*arguments: Any, **named: Any) -> Any:
        _check_sizes(*arguments, *named.values())
        return function(*arguments, **named)

    return call


def _format(text: Any, *arguments: Any, **named: Any) -> str:
    _check_format(text, *arguments, *named.values())
    return do_format(text, *arguments, **named)


def _check_sizes(*arguments: Any) -> None:
    """Raise JinjaError if a number, such as a width, is too large."""
    if any(isinstance(each, int) and each > _MOST_CHARACTERS for each in arguments):
        raise JinjaError("an argument of a function is too large")


def _check_format(text: Any, *arguments: Any) -> None:
    """Raise JinjaError if a width or a precision in the text of a format, or among its arguments, is too large."""
    _check_sizes(*arguments)
    if isinstance(text, str) and _WIDE.search(text):
        raise JinjaError("a width of a format is too large")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    """``raise_exception`` of transformers' templates."""
    raise JinjaError(message)
