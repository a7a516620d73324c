"""Requests to the OpenAI-compatible endpoint in tests, and chats behind it."""

from __future__ import annotations

import json

from fake_chat import FakeChat

from moa_chat.gateway.request import ChatRequest, Defaults, parse_request

DEFAULTS = Defaults("tiny", max_new_tokens=64, temperature=0.0, top_p=1.0, seed=None, system=None)
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello."}


def parse(defaults: Defaults = DEFAULTS, **fields) -> ChatRequest:
    return parse_request(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode(), defaults)


class PooledChat(FakeChat):
    """A chat that can be lent."""

    prompt_tokens = 5
    offline = "writer"
