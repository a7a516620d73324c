"""Answers as documents of a datastore."""

from __future__ import annotations

from collections.abc import Callable

from moa_runtime.tokenizer import ChatTokenizer

#: Tokens before an answer that belong to its document, so that its beginning is found too (as in SSSD, arXiv
#: 2411.05894, by its authors' program). Of the question nothing is stored: what the target writes is to be drafted.
LEAD_TOKENS = 3


def answer_encoder(tokenizer: ChatTokenizer) -> Callable[[str], list[int]]:
    """Makes an answer's document: how the chat template begins an answer, then the text.

    Raises:
        ChatTemplateError: the template refuses a conversation of one question.
    """
    lead = tokenizer.encode_chat([{"role": "user", "content": "?"}])[-LEAD_TOKENS:]
    return lambda text: [*lead, *tokenizer.encode(text)] if text else []
