"""The TypeScript runtime in Node, and what the target answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moa_runtime.bundle import Bundle
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from support.server.running import Verifier
from support.system.asking import QUESTION

WEB = Path(__file__).parents[3] / "runtime" / "web"


def client_command(
    web: Path, bundle: Path, port: int, file: Callable[[str], Path], samplings: Sequence[Sampling], **given: Any
) -> list[str]:
    """The command of a program that asks questions one after the other, and can be killed at any moment.

    Args:
        file: path of ``chat`` (the store), ``seen`` and ``done``, see ``runtime/web/test/system_client.ts``.
        samplings: of each question.
        given: ``token``, ``questions``, ``drafting``, ``length``; for ``moa-core.js``, ``engine`` and ``ort``, the
            module of onnxruntime-web.
    """
    given |= {"bundle": str(bundle), "url": f"ws://127.0.0.1:{port}"}
    given |= {"store": str(file("chat")), "seen": str(file("seen")), "done": str(file("done"))}
    given["samplings"] = [{"temperature": s.temperature, "top_p": s.top_p, "seed": str(s.seed)} for s in samplings]
    program = "engines/client.js" if "engine" in given else "system_client.js"
    return ["node", str(web / "dist" / "test" / program), json.dumps(given)]


def target_writes(bundle: Path, verifier: Verifier, length: int, sampling: Sampling) -> str:
    """The target's own answer to :data:`QUESTION`."""
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    return tokenizer.decode(verifier.decode(prompt, length, sampling))
