"""Request router for Ray Serve: a connection goes to the replica of its conversation's id."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from ray.serve._private.common import StreamingHTTPRequest
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from moa_runtime.transport import SESSION_ID_HEADER


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Ray's consistent hashing of the header ``x-session-id``, and of the query parameter of that name."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None and not pending_request.metadata.session_id:
            pending_request.metadata.session_id = session_id_in(pending_request.args)
        chosen: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return chosen


def session_id_in(arguments: Sequence[Any]) -> str:
    """Return the session id in the query of a request, the call's only argument: a ``StreamingHTTPRequest`` pickled by
    Ray's proxy. Empty if there is none."""
    request = pickle.loads(arguments[0]) if arguments and isinstance(arguments[0], bytes) else None
    query = request.asgi_scope.get("query_string", b"") if isinstance(request, StreamingHTTPRequest) else b""
    ids: list[str] = parse_qs(query.decode("latin-1")).get(SESSION_ID_HEADER, [""])
    return ids[0]
