"""The verifier that a benchmark talks to: one started for it in a process of its own, or the user's."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from moa_bench.cpus import pin, split_cpus
from moa_chat.local_verifier import local_verifier
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

_TIMEOUT_S = 120.0


class VerifierGoneError(MoaError):
    """The verifier does not answer any more."""


@dataclass(frozen=True)
class Verifier:
    """A running verifier, reached directly: what a benchmark asks for itself takes no emulated detour.

    Attributes:
        pid: of its process; None where it was not started here.
        pinned: whether verifier and caller have processors of their own.
    """

    endpoint: Endpoint
    pid: int | None = None
    pinned: bool = False

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Where a link emulator must lead to."""
        parts = urlsplit(self.endpoint.address)
        return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "wss" else 80)

    @property
    def http_url(self) -> str:
        """Scheme, host and port, for what goes over HTTP."""
        host, port = self.host_and_port
        return f"{'https' if self.endpoint.address.startswith('wss:') else 'http'}://{host}:{port}"

    def forwards(self) -> int:
        """Forward passes of the target so far, all sessions together."""
        return int(str(self.status()["forwards"]))

    def status(self) -> dict[str, object]:
        """Raises VerifierGoneError."""
        return self._ask("/v1/status")

    def decode(self, prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[int]:
        """What the target writes alone after ``prompt``, at most ``count`` tokens.

        Raises:
            VerifierGoneError: it does not answer.
            MoaError: it refused.
        """
        tokens = self._ask("/v1/decode", decode_request(prompt, count, sampling))["tokens"]
        assert isinstance(tokens, list)
        return tokens

    def _ask(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        request = urllib.request.Request(
            f"{self.http_url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.endpoint.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self.endpoint.tls) as response:
                answer: dict[str, object] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise MoaError(f"the verifier refused {path}: {error.read().decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise VerifierGoneError(f"the verifier at {self.http_url} does not answer any more: {error}") from error


def decode_request(prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> dict[str, object]:
    """Body of ``POST /v1/decode``; greedy when no sampling is given."""
    chosen = sampling or Sampling()
    return {
        "tokens": list(prompt),
        "max_new_tokens": count,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "seed": chosen.seed,
    }


@contextlib.contextmanager
def open_verifier(
    endpoint: Endpoint | None = None,
    *,
    model: str | None = None,
    drafter: str | None = None,
    dtype: str | None = None,
    options: Sequence[str] = (),
) -> Iterator[Verifier]:
    """The verifier at ``endpoint``, or, without one, a new process on processors of its own.

    While the context is open, this process keeps to the other processors.

    Args:
        options: more options of ``moa-serve``.

    Raises:
        MoaError: nothing answers at ``endpoint``, or the verifier does not start.
    """
    if endpoint is not None:
        verifier = Verifier(endpoint)
        verifier.status()
        yield verifier
        return
    with open_verifiers(("",), model=model, drafter=drafter, dtype=dtype, options=options) as verifiers:
        yield verifiers[""]


@contextlib.contextmanager
def open_verifiers(
    engines: Sequence[str],
    *,
    model: str | None = None,
    drafter: str | None = None,
    dtype: str | None = None,
    options: Sequence[str] = (),
) -> Iterator[dict[str, Verifier]]:
    """New processes, one for each engine of ``moa-serve``, all on the same processors; by the engine's name, which is
    empty for the default one. For the rest see :func:`open_verifier`."""
    given = {"--model": model, "--drafter": drafter, "--dtype": dtype}
    chosen = [word for name, value in given.items() if value for word in (name, str(value))]
    cpus = split_cpus()
    threads = ["--threads", str(len(cpus[1]))] if cpus else []
    verifiers = {}
    with contextlib.ExitStack() as stack:
        for engine in engines:
            own = [*chosen, *threads, *options, *(("--engine", engine) if engine else ())]
            local = stack.enter_context(local_verifier(own, cpus=cpus[1] if cpus else None))
            verifiers[engine] = Verifier(local.endpoint, local.pid, pinned=cpus is not None)
        if cpus:
            stack.callback(pin, 0, cpus[0] | cpus[1])
            pin(0, cpus[0])
        yield verifiers
