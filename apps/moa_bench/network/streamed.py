"""The server decodes alone and streams: what every chat API does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moa_bench.network.answer import Answer, Ask, Turn
from moa_bench.network.settings import NetworkSettings
from moa_bench.streaming import stream_decode
from moa_bench.verifier import Verifier, VerifierGoneError
from moa_runtime.session.events import Origin
from moa_runtime.transport import Endpoint

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class StreamMode:
    """``POST /v1/decode`` with ``"stream": true``, over an HTTP connection that is open already."""

    settings: NetworkSettings
    in_rounds: ClassVar[bool] = False

    @asynccontextmanager
    async def connect(self, endpoint: Endpoint, turn: Turn) -> AsyncIterator[Ask]:
        """See :meth:`moa_bench.network.answer.Mode.connect`."""
        import httpx

        url = Verifier(endpoint).http_url
        # Slowness is what is measured: an outage is sat out, and whoever asks has a limit of their own.
        async with httpx.AsyncClient(verify=endpoint.tls or True, timeout=None, trust_env=False) as client:
            try:
                await client.get(f"{url}/healthz")
            except httpx.TransportError as error:
                raise VerifierGoneError(f"no verifier answers at {url}: {error!r}") from error

            async def ask() -> Answer:
                exchanged: list[httpx.Response] = []

                async def note(response: httpx.Response) -> None:
                    exchanged.append(response)

                client.event_hooks = {"response": [note]}
                answer = Answer(time.perf_counter())
                asked = (turn.prompt, self.settings.max_new_tokens, self.settings.sampling)
                async for token in stream_decode(client, url, endpoint.token, *asked):
                    answer.add(time.perf_counter(), [token], [Origin.CORRECTED])
                answer.payload_up = sum(len(response.request.content) for response in exchanged)
                answer.payload_down = sum(response.num_bytes_downloaded for response in exchanged)
                return answer

            yield ask
