"""The verifier that a benchmark measures: one started in a process of its own, or the user's; and plain decoding."""

from __future__ import annotations

import contextlib
import http
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moa_chat.local_verifier import local_verifier
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 120.0
_DATA = "data: "


class VerifierGoneError(MoaError):
    """Raised when the verifier does not answer any more."""


@dataclass(frozen=True)
class Verifier:
    """A running verifier, reached directly and not through an emulated link.

    Attributes:
        pid: of its process; None if it was not started here.
        pinned: whether verifier and caller have processors of their own.
    """

    endpoint: Endpoint
    pid: int | None = None
    pinned: bool = False

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Host and port that a link emulator has to forward to."""
        parts = urlsplit(self.endpoint.address)
        return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "wss" else 80)

    @property
    def http_url(self) -> str:
        """Scheme, host and port for requests over HTTP."""
        host, port = self.host_and_port
        return f"{'https' if self.endpoint.address.startswith('wss:') else 'http'}://{host}:{port}"

    def forwards(self) -> int:
        """Return the target's forward passes so far, of all sessions together."""
        return int(self.status()["forwards"])

    def status(self) -> dict[str, Any]:
        """Return the verifier's status. Raises VerifierGoneError if it does not answer."""
        return self._ask("/v1/status")

    def decode(self, prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[int]:
        """Let the target write alone after ``prompt``, at most ``count`` tokens. Raises MoaError if it refuses."""
        return self._ask("/v1/decode", decode_request(prompt, count, sampling))["tokens"]

    def _ask(self, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.endpoint.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.http_url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self.endpoint.tls) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise MoaError(_refusal(path, error.code, error.read()), code="refused") from error
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            remedy = ": start moa-serve, or correct --server" if self.pid is None else ""
            text = f"the verifier at {self.http_url} does not answer ({reason}){remedy}"
            raise VerifierGoneError(text, code="verifier_gone") from error


def _refusal(path: str, status: int, body: bytes) -> str:
    """Say why the verifier refused a request, and how to give it a bearer token if that was missing or wrong."""
    said = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = str(json.loads(said)["error"])
    remedy = ": name it with --token or MOA_TOKEN" if status == http.HTTPStatus.UNAUTHORIZED else ""
    return f"the verifier refused {path}: {said}{remedy}"


def decode_request(prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> dict[str, object]:
    """Make the body of ``POST /v1/decode``; greedy by default."""
    chosen = sampling or Sampling()
    how = {"temperature": chosen.temperature, "top_p": chosen.top_p, "seed": chosen.seed}
    return {"tokens": list(prompt), "max_new_tokens": count, **how}


@contextlib.contextmanager
def open_verifier(
    endpoint: Endpoint | None = None, *, options: Sequence[str] = (), **wanted: str | None
) -> Iterator[Verifier]:
    """Use the verifier at ``endpoint``, or start a process; see :func:`open_verifiers`."""
    with open_verifiers([""], endpoint, options=options, **wanted) as verifiers:
        yield verifiers[""]


@contextlib.contextmanager
def open_verifiers(
    engines: Sequence[str], endpoint: Endpoint | None = None, *, options: Sequence[str] = (), **wanted: str | None
) -> Iterator[dict[str, Verifier]]:
    """Use the verifier at ``endpoint``, or start a process for each engine, all on the same processors.

    While the context is open, this process keeps to the other processors. Yields the verifiers by engine.

    Args:
        engines: of ``moa-serve``; an empty name for the default one.
        options: further options of ``moa-serve``.
        wanted: ``model``, ``drafter`` and ``dtype``, as of ``moa-serve``.

    Raises:
        MoaError: nothing answers at ``endpoint``, or a verifier does not start.
    """
    if endpoint is not None:
        verifier = Verifier(endpoint)
        verifier.status()
        yield {engines[0]: verifier}
        return
    chosen = [word for name, value in wanted.items() if value for word in (f"--{name}", str(value))]
    cpus = split_cpus()
    threads = ["--threads", str(len(cpus[1]))] if cpus else []
    verifiers = {}
    with contextlib.ExitStack() as stack:
        for engine in engines:
            own = [*chosen, *threads, *options, *(("--engine", engine) if engine else ())]
            local = stack.enter_context(local_verifier(own, cpus=cpus[1] if cpus else None))
            verifiers[engine] = Verifier(local.endpoint, local.pid, pinned=cpus is not None)
        if cpus:
            stack.callback(os.sched_setaffinity, 0, cpus[0] | cpus[1])
            os.sched_setaffinity(0, cpus[0])
        yield verifiers


async def stream_decode(
    client: httpx.AsyncClient,
    base_url: str,
    token: str,
    tokens: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
) -> AsyncGenerator[int, None]:
    """Stream the tokens that the target writes alone after ``tokens``, as chat APIs do (``POST /v1/decode``).

    Close the generator (``contextlib.aclosing``) to stop early: the verifier then stops decoding too. Raises
    VerifierGoneError: the connection was lost; MoaError: the verifier refused.
    """
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {**decode_request(tokens, max_new_tokens, sampling), "stream": True}
    try:
        async with client.stream("POST", f"{base_url}/v1/decode", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise MoaError(_refusal("/v1/decode", response.status_code, await response.aread()), code="refused")
            async for line in response.aiter_lines():
                if not line.startswith(_DATA):
                    continue  # the empty line between two events
                event = json.loads(line.removeprefix(_DATA))
                if "error" in event:
                    raise MoaError(f"the verifier broke a stream off: {event['error']}", code="refused")
                if "token" not in event:
                    return
                yield event["token"]
    except httpx.TransportError as error:
        text = f"the verifier at {base_url} does not answer any more: {error!r}"
        raise VerifierGoneError(text, code="verifier_gone") from error
    text = f"the verifier at {base_url} ended a stream before its answer was complete"
    raise VerifierGoneError(text, code="verifier_gone")


def split_cpus() -> tuple[set[int], set[int]] | None:
    """Split this process's processors between client (and link) and verifier, so that neither slows the other; returns
    None with one processor, or if the system cannot tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        return None
    half = len(own) // 2
    return set(own[:half]), set(own[half:])
