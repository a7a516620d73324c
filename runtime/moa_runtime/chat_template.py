"""A target's chat template: downloaded code, so it runs in a sandbox in which every operation has a price.

A render has a budget of steps and characters, and no value is larger than a limit. Prices are taken before work that
cannot be interrupted. No clock is involved: a slow device renders what a fast one does.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.filters import do_format, do_indent, do_join, do_round
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from moa_runtime.errors import MoaError
from moa_runtime.reasoning import ENABLE_THINKING

#: A turn, ``{"role": ..., "content": ...}``. An assistant's may have ``tool_calls``, each
#: ``{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}``, and a tool's a ``name`` and a
#: ``tool_call_id``.
Message = Mapping[str, Any]
#: A function that the target may call, as OpenAI describes it: ``{"type": "function", "function": {"name": ...}}``.
Tool = Mapping[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Characters of a template.
_LONGEST_TEMPLATE = 1 << 17
#: Steps and characters of a render, of its result and of each value; more for long conversations, by their characters.
_BUDGET, _BUDGET_A_CHARACTER = 1 << 22, 64
_LARGEST, _LARGEST_A_CHARACTER = 1 << 20, 4
#: Prices of a call, of an operator, and of an iteration.
_CALL, _OPERATOR, _ITERATION = 96, 8, 4
#: Digits that a number is rounded to; a float has fewer.
_MOST_DIGITS = 400
#: Bits of numbers, levels of lists in lists, characters of an indentation, and of a text sought from the end.
_MOST_BITS, _DEEPEST, _WIDEST, _LONGEST_SOUGHT = 1 << 12, 64, 16, 64
#: A width or a precision of more than 999,999 in the text of a format.
_WIDE = re.compile("[1-9][0-9]{6}")

#: Filters and methods that chat templates may use, those of the TypeScript client among them.
_FILTERS = _words(
    "abs capitalize center count d default dictsort e escape first float format indent int items join last length list "
    "lower map max min reject rejectattr replace reverse round safe select selectattr sort string title tojson trim "
    "truncate unique upper"
)
_METHODS = _words(
    "capitalize count current cycle changed endswith find get index isalnum isalpha isdigit islower isnumeric isspace "
    "isupper items join keys lower lstrip next partition removeprefix removesuffix replace rfind rpartition rsplit "
    "rstrip split splitlines startswith strip title upper values"
)
#: Filters and tests that look into all of a list.
_DEEP_FILTERS = _words("dictsort join max min sort unique")
_COMPARISONS = _words("eq ne lt le gt ge == != < <= > >= equalto lessthan greaterthan in")


class ChatTemplateError(MoaError):
    """A chat template cannot be read, or refuses a conversation."""


class _BudgetError(JinjaError):
    """A template takes too many steps, or makes too many characters."""


class _Meter(threading.local):
    """Budget of the render that runs in a thread, and the limit of its values' weights."""

    left, largest = 0, 0

    def spend(self, price: int) -> None:
        """Take ``price`` of the budget, or raise the error that ends the render."""
        self.left -= price
        if self.left < 0:
            raise _BudgetError("it does not end")

    def weight(self, value: Any, depth: int = 0) -> int:
        """Return a bound for the characters of a value, its parts included, and pay for it; raise JinjaError if it is
        too large to be a value, or no plain one."""
        if isinstance(value, str):
            weight = len(value)
        elif isinstance(value, Namespace):
            raise JinjaError("a namespace is no value")
        elif isinstance(value, int):
            weight = value.bit_length()
        elif isinstance(value, Mapping | Sequence | KeysView | ValuesView | ItemsView):
            if depth > _DEEPEST:
                raise JinjaError("lists are nested too deeply")
            weight = 2
            for part in chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
                weight += 2 + self.weight(part, depth + 1)
                self.check(weight)
        else:
            weight = 16
        self.spend(1 + weight)
        return weight

    def check(self, weight: int) -> None:
        """Raise JinjaError if a value of that weight is too large."""
        if weight > self.largest:
            raise JinjaError("a value of the template is too large")


_meter = _Meter()


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it has no effect on its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Compile operations that the sandbox does not intercept to calls of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Any) -> None:  # noqa: N802
        self._wrapped("checked", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self._wrapped("checked", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:  # noqa: N802
        if node.ctx == "load":
            self._wrapped("checked", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("checked", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:  # noqa: N802
        self.write("(")
        self._wrapped("compared", self.visit, node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Any) -> None:  # noqa: N802
        names = {
            "eq": "==",
            "ne": "!=",
            "gt": ">",
            "gteq": ">=",
            "lt": "<",
            "lteq": "<=",
            "in": "in",
            "notin": "not in",
        }
        self.write(f" {names[node.op]} ")
        self._wrapped("compared", self.visit, node.expr, frame)

    def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802
        node.iter = nodes.Call(nodes.EnvironmentAttribute("iterated"), [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def _wrapped(self, name: str, visit: Callable[..., None], node: nodes.Node, frame: Any) -> None:
        self.write(f"environment.{name}(")
        visit(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """An environment with transformers' settings, so that a template renders to the same text, and with limits."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
            optimized=False,  # constants are not computed while the template is read
            finalize=_finalized,
        )
        own = {
            "tojson": _to_json,
            "format": _format,
            "replace": _replace,
            "round": _round,
            "indent": _indent,
            "join": _join,
        }
        self.filters = {name: _priced((self.filters | own)[name], deep=name in _DEEP_FILTERS) for name in _FILTERS}
        self.tests |= {name: _priced(self.tests[name], deep=True) for name in _COMPARISONS}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner", "namespace")}
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now

    # -- called by compiled templates ----------------------------------------------------------

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join output, paying for each piece before the next one is made."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            _meter.spend(_OPERATOR + len(piece))
            _meter.check(size)
            kept.append(piece)
        return "".join(kept)

    @staticmethod
    def joined(parts: Sequence[Any]) -> str:
        """Compute ``a ~ b``."""
        _meter.check(sum(map(_meter.weight, parts)))
        return "".join(map(str, parts))

    @staticmethod
    def checked(value: Any) -> Any:
        """Return a value after checking its weight."""
        _meter.check(_meter.weight(value))
        return value

    @staticmethod
    def compared(value: Any) -> Any:
        """Return an operand of a comparison after paying for it."""
        _meter.spend(_OPERATOR)
        if not isinstance(value, Namespace):
            _meter.weight(value)
        return value

    @staticmethod
    def iterated(values: Iterable[Any]) -> Iterable[Any]:
        """Pay for the iterations of a loop."""
        if isinstance(values, Sized):
            _meter.spend(_ITERATION * len(values))
            return values
        return _iterations(values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check an operation before it runs."""
        _meter.spend(_OPERATOR)
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 0
            if bits * (right if isinstance(right, int) else 0) > _MOST_BITS:
                raise JinjaError("the result of '**' is too large")
        elif operator in "+*":
            self._check_growth(operator, left, right)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _check_growth(operator: str, left: Any, right: Any) -> None:
        """Raise JinjaError if a sum or a product is too large, before it is computed."""
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MOST_BITS:
                raise JinjaError(f"the result of {operator!r} is too large")
            return
        if any(isinstance(each, float) for each in (left, right)):
            return
        times = max((each for each in (left, right) if isinstance(each, int)), default=1) if operator == "*" else 1
        weight = sum(_meter.weight(each) for each in (left, right)) * max(times, 1)
        _meter.check(weight)
        _meter.spend(weight)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Pay for the hash of a key."""
        if not isinstance(argument, str):
            _meter.weight(argument)
        return super().getitem(obj, argument)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Check a call before it runs: what is called, and the size of its result."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        values = (*arguments, *named.values())
        text = getattr(getattr(function, "__wrapped__", None), "__self__", None)
        own = isinstance(function, Macro | LoopContext | Joiner) or function == self.iterated
        if isinstance(owner, str | Mapping | list | tuple | LoopContext | Cycler):
            if name not in _METHODS:
                raise JinjaError(f"the method {name!r} is not one of those that chat templates may call")
            _check_method(owner, name, *values)
        elif name == "format" and isinstance(text, str):  # the sandbox's own
            _check_braces(text, arguments, named)
        elif not own and not any(function is each for each in self.globals.values()):
            raise JinjaError(f"{name or 'a value'!r} is no function that chat templates may call")
        elif isinstance(function, LoopContext):  # a loop in itself, of other values
            arguments = (self.iterated(*arguments),)
        _check_sizes(*values)
        _meter.spend(_CALL)
        result = super().call(context, function, *arguments, **named)
        if isinstance(result, str | list | tuple | dict) and function != self.iterated:
            _meter.check(_meter.weight(result))
        return result


class ChatTemplate:
    """A chat template. Any thread may use it.

    Args:
        source: Jinja, as in transformers.
        special_tokens: names that the template may use, such as ``{"bos_token": "<s>"}``.

    Raises:
        ChatTemplateError: it cannot be read.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > _LONGEST_TEMPLATE:
            text = f"the chat template has {len(source)} characters, more than {_LONGEST_TEMPLATE}: export another one"
            raise ChatTemplateError(text, code="too_large")
        try:
            self._template = _Environment().from_string(source)
        except Exception as error:  # of jinja2, or of Python for what it compiles to
            reason = str(error) or f"it is too complex ({type(error).__name__})"
            raise ChatTemplateError(f"the chat template cannot be read: {reason}", code="unreadable") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        #: Whether reasoning can be switched.
        self.knows_thinking = ENABLE_THINKING in source

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """Return the text of a conversation as the target was trained on it.

        Args:
            thinking: whether the target reasons before it answers; None for the template's default.
            tools: functions that the target may call; None for none.

        Raises:
            ChatTemplateError: the template refuses these messages, fails, or (code ``endless``) takes too many steps.
        """
        copies = [dict(message) for message in messages]
        try:
            characters = _characters(copies) + _characters(tools)
            _meter.left = _BUDGET + _BUDGET_A_CHARACTER * characters
            _meter.largest = _LARGEST + _LARGEST_A_CHARACTER * characters
            own = {} if thinking is None else {ENABLE_THINKING: thinking}
            given = None if tools is None else [dict(tool) for tool in tools]
            return self._template.render(
                messages=copies,
                add_generation_prompt=add_generation_prompt,
                tools=given,
                xml_tools=given,  # SmolLM 3's name
                **self._special_tokens,
                **own,
            )
        except _BudgetError as error:
            text = "the chat template does not end, or writes without end: export the bundle again with another one"
            raise ChatTemplateError(text, code="endless") from error
        except Exception as error:  # foreign code may raise anything
            text = f"the chat template refuses this conversation: {str(error) or type(error).__name__}"
            raise ChatTemplateError(text, code="template_refuses") from error


def _characters(value: Any) -> int:
    """Return the characters of the texts in a value, and some for each part."""
    if isinstance(value, str):
        return len(value) + 16
    if isinstance(value, Mapping):
        return _characters(list(value.items()))
    return 16 + sum(map(_characters, value)) if isinstance(value, list | tuple) else 16


def _iterations(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _meter.spend(_ITERATION)
        yield value


@pass_context  # so that jinja2 computes no constant output while it compiles
def _finalized(context: Any, value: Any) -> Any:
    """Check output that is no text before it becomes one."""
    if not isinstance(value, str):
        _meter.check(_meter.weight(value))
    return value


def _priced(function: Any, *, deep: bool) -> Callable[..., Any]:
    """Return a filter or a test that pays for its work and checks its result.

    Args:
        deep: whether it looks into all of its arguments.
    """

    @wraps(function)  # keeps jinja2's marks of the filter
    def call(*arguments: Any, **named: Any) -> Any:
        values = (*arguments, *named.values())
        _check_sizes(*values)
        _meter.spend(_CALL + sum(len(each) for each in values if isinstance(each, str | list | tuple)))
        if deep:
            sizes = [_meter.weight(each) for each in values if isinstance(each, str | list | tuple | dict)]
            _meter.spend(4 * sum(sizes))
        result = function(*arguments, **named)
        if isinstance(result, str | list | tuple | dict):
            _meter.check(_meter.weight(result))
        return result

    return call


def _check_sizes(*arguments: Any) -> None:
    """Raise JinjaError if a number, such as a width, is too large; a negative width pads on the other side."""
    if any(isinstance(each, int) and abs(each) > _LARGEST for each in arguments):
        raise JinjaError("an argument of a function is too large")


def _check_method(owner: Any, name: str, *arguments: Any) -> None:
    """Raise JinjaError if a method of a text would take too long or return too much."""
    texts = [each for each in arguments if isinstance(each, str)]
    _meter.spend(len(owner) if isinstance(owner, str | list | tuple) else 1)
    for each in arguments:
        _meter.weight(each)
    if name == "replace" and len(texts) > 1:
        _check_replaced(owner, *texts[:2])
    elif name == "join" and hasattr(arguments[0], "__len__"):
        _meter.check(len(arguments[0]) * len(owner))
    elif name.startswith("r") and any(len(text) > _LONGEST_SOUGHT for text in texts):  # Python's search is quadratic
        raise JinjaError(f"the argument of {name!r} is too long")


def _check_replaced(text: str, old: str, new: str) -> None:
    weight = len(text) + (text.count(old) if old else len(text) + 1) * len(new)
    _meter.check(weight)
    _meter.spend(weight)


def _check_format(text: str, arguments: Any) -> None:
    """Raise JinjaError if a width or a precision in the text of a format, or among its arguments, is too large, or if
    its result would be."""
    values = arguments if isinstance(arguments, tuple) else (arguments,)
    if _WIDE.search(text):
        raise JinjaError("a width of a format is too large")
    width = sum(map(int, re.findall("[0-9]+", text)))
    if "*" in text:  # a number among the arguments is a width
        _check_sizes(*values)
        width += sum(abs(each) for each in values if isinstance(each, int))
    times = text.count("%") if isinstance(arguments, Mapping) else 1
    _meter.check(len(text) + width + times * _meter.weight(arguments))


def _check_braces(text: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """The same for the method ``format``."""
    if _WIDE.search(text) or re.search(r":[^}]*\{", text):  # a width that is an argument
        raise JinjaError("a width of a format is too large")
    width = sum(map(int, re.findall("[0-9]+", text)))
    _meter.check(len(text) + width + text.count("{") * (_meter.weight(arguments) + _meter.weight(named)))


def _format(text: str, *arguments: Any, **named: Any) -> str:
    _check_format(text, named or arguments)
    return do_format(text, *arguments, **named)


def _round(value: Any, precision: int = 0, *arguments: Any, **named: Any) -> Any:
    if abs(precision) > _MOST_DIGITS:  # it computes 10 to this power
        raise JinjaError("an argument of 'round' is too large")
    return do_round(value, precision, *arguments, **named)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replaced(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    each = len(width) if isinstance(width, str) else width
    _meter.check(len(text) + (len(text.splitlines()) + 1) * max(each, 0))
    return do_indent(text, width, first, blank)


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> Any:
    values = list(value)
    _meter.check(_meter.weight(values) + len(values) * len(str(d)))
    return do_join(context, values, d, attribute)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (indent or 0) > _WIDEST or any(len(each) > _WIDEST for each in separators or ()):
        raise JinjaError("an indentation or a separator is too long")
    _meter.spend(_meter.weight(value) * (8 + (indent or 0) * _DEEPEST))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    _check_format(form, ())
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    """``raise_exception`` of transformers' templates."""
    raise JinjaError(message)
