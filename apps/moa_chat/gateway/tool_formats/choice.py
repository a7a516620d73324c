"""Choose the format of a target by its chat template."""

from __future__ import annotations

import re

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.tool_formats.functiongemma import FunctionGemmaFormat
from moa_chat.gateway.tool_formats.granite import GraniteFormat
from moa_chat.gateway.tool_formats.hermes import HermesFormat
from moa_chat.gateway.tool_formats.llama3 import Llama3Format
from moa_chat.gateway.tool_formats.mistral import MistralFormat
from moa_chat.gateway.tool_formats.prompted import PromptedFormat
from moa_chat.gateway.tool_formats.qwen3_coder import Qwen3CoderFormat
from moa_chat.gateway.tool_formats.smollm3 import SmolLM3Format
from moa_chat.gateway.tool_formats.tool_format import ToolFormat
from moa_runtime.reasoning import CLOSE, OPEN
from moa_runtime.tokenizer import ChatTokenizer

#: In the order in which they are tried: the marks of some occur in the templates of others.
FORMATS: tuple[type[ToolFormat], ...] = (
    Qwen3CoderFormat,
    FunctionGemmaFormat,
    SmolLM3Format,
    MistralFormat,
    GraniteFormat,
    Llama3Format,
    HermesFormat,
)
#: The variable of the tools in a statement or an expression of a template.
_KNOWS_TOOLS = re.compile(r"\{[%{](?:[^%}]|[%}](?!\}))*\b(?:xml_)?tools\b")
#: Of calls in XML, in most templates in another form than Qwen 3 Coder's.
_XML = "<function="


def format_class(source: str) -> type[ToolFormat]:
    """Return the format in which the target of a chat template writes calls. Raises ApiError if it is none of those
    known."""
    if not _KNOWS_TOOLS.search(source):
        return PromptedFormat
    for form in FORMATS:
        if form.known_by(source) and (_XML not in source or form is Qwen3CoderFormat):
            return form
    text = "tools: this target's chat template has it write calls in a form that is not known here"
    raise ApiError(400, text, param="tools", code="unsupported_tools")


def tool_format(tokenizer: ChatTokenizer) -> ToolFormat:
    """Return the format of a tokenizer's chat template; see :func:`format_class`."""
    form = format_class(tokenizer.template_source)
    special = tokenizer.special_tokens((*form.marks, OPEN, CLOSE))
    return form(tokenizer.template_source, special, tokenizer.thought)
