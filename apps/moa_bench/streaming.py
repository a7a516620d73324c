"""Plain decoding as chat APIs serve it: a client of ``POST /v1/decode`` with ``"stream": true``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from moa_bench.verifier import VerifierGoneError, decode_request
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling

if TYPE_CHECKING:
    import httpx

_DATA = "data: "


async def stream_decode(
    client: httpx.AsyncClient,
    base_url: str,
    token: str,
    tokens: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
) -> AsyncGenerator[int, None]:
    """The tokens that the target writes alone after ``tokens``, each as it arrives.

    Close the generator (``contextlib.aclosing``) to stop early: the verifier then stops decoding too.

    Args:
        base_url: scheme, host and port of the verifier, :attr:`moa_bench.verifier.Verifier.http_url`.
        token: bearer token; empty for none.

    Raises:
        VerifierGoneError: the connection was lost.
        MoaError: the verifier refused.
    """
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {**decode_request(tokens, max_new_tokens, sampling), "stream": True}
    try:
        async with client.stream("POST", f"{base_url}/v1/decode", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                raise MoaError(f"the verifier refused to stream: {said}")
            async for line in response.aiter_lines():
                if not line.startswith(_DATA):
                    continue  # the empty line between two events
                event = json.loads(line.removeprefix(_DATA))
                if "error" in event:
                    raise MoaError(f"the verifier broke a stream off: {event['error']}")
                if "token" not in event:
                    return
                yield event["token"]
    except httpx.TransportError as error:
        raise VerifierGoneError(f"the verifier at {base_url} does not answer any more: {error!r}") from error
    raise VerifierGoneError(f"the verifier at {base_url} ended a stream before its answer was complete")
