"""What a test knows of the verifier that serves its page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from moa_runtime.bundle import Bundle
from moa_runtime.tokenizer import ChatTokenizer

#: ``moa-serve``, wherever its program is.
SERVE = (sys.executable, "-c", "import sys; from moa_server.cli import main; sys.exit(main())")
TOKEN = "secret+of the tiny/target"
TIMEOUT_S = 60


@dataclass
class Site:
    """A running verifier with its page, on all addresses of this machine."""

    port: int
    bundle: Bundle

    def url(self, host: str = "127.0.0.1", *, port: int | None = None, token: str = TOKEN) -> str:
        """The page's address, with a token as a QR code has it; ``port`` is that of a link in front."""
        fragment = f"#token={quote(token, safe='')}" if token else ""
        return f"http://{host}:{port or self.port}/{fragment}"

    def target_writes(self, question: str, count: int) -> str:
        """What the target alone answers to the first question of a chat, greedily."""
        tokenizer = ChatTokenizer.from_bundle(self.bundle)
        messages = [{"role": "user", "content": question}]
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/decode",
            json={"tokens": tokenizer.encode_chat(messages), "max_new_tokens": count},
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=TIMEOUT_S,
        )
        return tokenizer.decode(answer.json()["tokens"])
