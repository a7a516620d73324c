"""Requests to the OpenAI-compatible endpoint in tests, and chats behind it."""

from __future__ import annotations

import json
from types import SimpleNamespace

from moa_chat.gateway.requests import AnswerRequest, Defaults, parse_chat, parse_completion
from support.chat.fake_chat import FakeChat

DEFAULTS = Defaults("tiny", max_new_tokens=64, temperature=0.0, top_p=1.0, seed=None, system=None)
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello."}


def parse(defaults: Defaults = DEFAULTS, **fields) -> AnswerRequest:
    return parse_chat(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode(), defaults)


def parse_text(defaults: Defaults = DEFAULTS, **fields) -> AnswerRequest:
    return parse_completion(json.dumps({"model": "tiny", "prompt": "Once", **fields}).encode(), defaults)


class PooledChat(FakeChat):
    """A chat that can be lent."""

    prompt_tokens = 5
    offline = "writer"
    thinking = tools = None
    shown_tokens = frozenset()
    gave_up = False
    manifest = SimpleNamespace(writer=None)
